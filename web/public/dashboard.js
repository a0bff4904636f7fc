// The dashboard: asks once a second how everything is, and shows it.

import { at } from './at.js';
import { Chart } from './chart.js';
import { save } from './csv.js';
import { key } from './key.js';
import { sparkline } from './plot.js';
import { isDay, remembered, said, summary } from './stats.js';

const ASK_MS = 1_000;
const KEPT = 120; // values of a sparkline
const DAY_MS = 60_000;
const DAYS = 20; // pages whose last day is shown: those with the most viewers

const $ = (id) => document.getElementById(id);
const number = (n, digits = 0) => (n === undefined ? '–' : n.toLocaleString('en', { maximumFractionDigits: digits }));

// the site that is shown; empty: the server chooses
let chosen = new URLSearchParams(location.search).get('site') ?? '';
let last; // the answer before, for rates: {at, processes: Map}
let asked = ''; // the page whose count is explained
let viewers = new Map(); // region -> how many are there
const history = new Map(); // page -> its latest counts; as many pages as an answer has, at most 100

/** How a request names the chosen site: in its headers, or in its query. */
const inSite = () => (chosen ? { 'Headcount-Site': chosen } : {});
const ofSite = () => (chosen ? `site=${encodeURIComponent(chosen)}` : '');

/** Draws the past that was asked for, and the last day of the pages with the most viewers. */
async function days() {
  if (document.hidden || $('board').hidden) return;
  if (asked) explain(asked);
  const about = chosen;
  if (!(await past())) return; // the server remembers nothing
  for (const row of [...$('pages').rows].slice(0, DAYS)) {
    const stats = await remembered(row.dataset.name, ofSite());
    if (about !== chosen) return; // another site is shown by now
    if (stats && row.isConnected) drawDay(drawing(row.cells[3]), stats);
  }
}

const chart = new Chart($('past-chart'));
const shown = { page: '*', last: '24h', step: '5m', points: [] };

/** Shows what a page remembers, of as long as was asked for; false if the server remembers nothing. */
async function past(change = {}) {
  Object.assign(shown, change);
  const { page, last, step } = shown;
  const about = chosen;
  const answer = await fetch(at(`${encodeURIComponent(page)}/stats?last=${last}&step=${step}`), {
    headers: inSite(),
  }).catch(() => undefined);
  if (about !== chosen || page !== shown.page || last !== shown.last) return true; // something else is asked for by now
  if (answer?.status === 404) return false;
  const stats = await said(answer);
  $('past').hidden = false;
  $('past-title').textContent = page === '*' ? 'The whole site' : page;
  $('past-site').hidden = page === '*';
  for (const button of $('past').querySelectorAll('[data-last]'))
    button.setAttribute('aria-pressed', String(button.dataset.last === last));
  shown.points = stats?.points ?? [];
  chart.show(shown.points);
  const span = last === '24h' ? '24 hours' : `${parseInt(last, 10)} days`;
  const what = last === '24h' ? 'The greatest count of each 5 minutes' : 'The greatest and the mean count of each day';
  $('past-chart').setAttribute('aria-label', `${what} of the last ${span}`);
  if (stats)
    $('past-summary').textContent = stats.peak.count
      ? summary(stats, span)
      : 'Nobody was here.';
  else
    $('past-summary').textContent =
      answer?.status === 400
        ? 'The server does not keep as many days: start it with --page-days 400.'
        : 'The server does not answer.';
  return true;
}

/** Says below the pages what the count of one is made of. It is asked of all owners, so not as often as the rest. */
async function explain(page) {
  if (page !== asked) $('explained').hidden = true;
  asked = page;
  const about = chosen;
  const answer = await fetch(at(`${encodeURIComponent(page)}/counter?explain=1`), { headers: { ...key.headers, ...inSite() } }).catch(() => undefined);
  const explained = await said(answer);
  if (!explained || page !== asked || about !== chosen) return; // something else is asked for by now
  const { counter, explain: e } = explained;
  const regions = Object.entries(e.regions);
  const parts = [
    `${number(e.people - e.held - e.leaving)} with a connection (${number(e.connections)} in all)`,
    `${number(e.held)} by a hold alone`,
    `${number(e.leaving)} leaving`,
    ...(regions.length > 1 ? [`by region ${regions.map(([name, users]) => `${name} ${number(users)}`).join(', ')}`] : []),
    `${number(e.ignored)} crawlers not counted`,
  ];
  $('explained').textContent = `${page === '*' ? 'The whole site' : page}: ${number(counter.count)} now: ${parts.join(' · ')}${e.moving ? ' · changes are under way' : ''}.`;
  $('explained').hidden = false;
}

function drawDay(svg, { points }) {
  sparkline(svg, points.map((point) => point.max), points.length);
}

/** The drawing in a cell of a table. */
function drawing(cell) {
  if (!cell.firstChild) {
    const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
    svg.setAttribute('aria-hidden', 'true');
    cell.append(svg);
  }
  cell.className = 'number';
  return cell.firstChild;
}

async function ask() {
  if (document.hidden) return;
  const fits = await key.fits();
  const about = chosen;
  const headers = { ...key.headers, ...inSite() };
  const answer = fits
    ? await fetch(at('-/dashboard/data'), { headers, signal: AbortSignal.timeout(10 * ASK_MS) }).catch(() => undefined)
    : undefined;
  if (about !== chosen) return; // another site is shown by now
  if (answer?.status === 403 && (await allowed())) return;
  const refused = answer?.status === 401;
  $('key').hidden = fits !== false && !refused;
  if (refused) {
    key.value = '';
    $('trouble').textContent = 'The server does not know this key.';
  } else if (fits) $('trouble').textContent = '';
  if (refused || fits === false) {
    $('board').hidden = true;
    return state('waiting', 'needs a key');
  }
  if (!answer?.ok) return state('waiting', answer ? 'the server is not ready' : 'reconnecting');
  const first = !last;
  const board = await said(answer);
  if (about !== chosen) return;
  if (!board) return state('waiting', 'a proxy may want a log-in');
  show(board);
  if (first) days();
  state(
    { good: 'open', warn: 'waiting' }[board.state.level] ?? 'bad',
    { good: 'live', warn: 'live, with a fault' }[board.state.level] ?? 'not live',
  );
  if (board.regions.length) await parts();
}

/** Says how many are in each region. */
async function parts() {
  const answer = await fetch(at('%2A/counter?regions=1'), {
    headers: { Accept: 'application/json', ...inSite() },
  }).catch(() => undefined);
  const regions = (await said(answer))?.regions;
  viewers = new Map(Object.entries(regions ?? {}));
  $('parts').textContent = [...viewers].map(([name, count]) => `${name} ${number(count)}`).join(' · ');
}

/** Shows the first site that the key holds for; false if that is the one already. */
async function allowed() {
  const answer = await fetch(at('-/sites'), { headers: key.headers }).catch(() => undefined);
  const first = (await said(answer))?.sites[0].name ?? chosen;
  if (first === chosen) return false;
  choose(first);
  return true;
}

/** Shows another site. */
function choose(name) {
  chosen = name;
  last = undefined;
  shown.page = '*';
  asked = '';
  $('explained').hidden = true;
  history.clear();
  const address = new URL(location);
  address.searchParams.set('site', name);
  window.history.replaceState(null, '', address);
  ask();
}

/** Offers the sites, if there are several. */
function offer(sites, name) {
  $('sites').hidden = !sites;
  if (!sites) return;
  const select = $('sites').querySelector('select');
  if (select.options.length !== sites.length) select.replaceChildren(...sites.map((site) => new Option(site)));
  select.value = name;
}

function state(name, text) {
  $('state').dataset.state = name;
  $('state').textContent = text;
}

function show({ at, region, state, site, pages, processes, regions, events, sites, shown: name }) {
  if (last?.at === at) return; // it is kept for a second
  offer(sites, name);
  $('board').hidden = false;
  $('region').textContent = `region ${region}`;
  if ($('well').textContent !== state.text) $('well').textContent = state.text; // a screen reader hears news alone
  $('well').dataset.level = state.level;
  $('events').replaceChildren(...events.map(happened));
  const before = last?.processes;
  const seconds = (at - (last?.at ?? at)) / 1000;
  last = { at, processes: new Map(processes.map((p) => [`${p.name} ${p.since}`, p.load])) };
  const rate = (process, metric) => {
    const old = before?.get(`${process.name} ${process.since}`)?.[metric];
    const now = process.load?.[metric];
    return old === undefined || now === undefined || seconds <= 0 ? undefined : Math.max(0, now - old) / seconds;
  };
  const sum = (value) => {
    const known = processes.map(value).filter((v) => v !== undefined);
    return known.length ? known.reduce((a, b) => a + b, 0) : undefined;
  };

  $('site').textContent = site ? number(site.count) : '–';
  $('pages-total').textContent = pages.length < 100 ? number(pages.length) : '100 or more';
  $('connections').textContent = number(sum((p) => p.load?.headcount_connections));
  $('deliveries').textContent = number(sum((p) => rate(p, 'headcount_deliveries_total')), 1);
  $('messages').textContent = number(sum((p) => rate(p, 'headcount_client_messages_total')), 1);

  showPages(pages);
  rows($('processes'), processes, (p) => p.name, 11, (cells, p, row) => {
    const load = p.load ?? {};
    const texts = [
      p.name,
      (p.roles ?? []).join(', ') || 'leaving',
      age(p.since),
      number(load.headcount_connections),
      number(rate(p, 'headcount_deliveries_total'), 1),
      number(rate(p, 'headcount_client_messages_total'), 1),
      number(load.headcount_users),
      number(load.headcount_partitions_owned),
      number(rate(p, 'headcount_store_changes_total'), 1),
      p.load && rate(p, 'process_cpu_seconds_total') !== undefined
        ? `${number(100 * rate(p, 'process_cpu_seconds_total'), 1)} %`
        : '–',
      p.load ? `${number(load.process_resident_memory_bytes / 2 ** 20)} MB` : 'no answer',
    ];
    row.classList.toggle('silent', !p.load);
    cells.forEach((cell, i) => {
      cell.textContent = texts[i];
      cell.classList.toggle('number', i > 1);
    });
  });
  $('regions-section').hidden = regions.length === 0;
  rows($('regions'), regions, (r) => r.name, 5, (cells, r, row) => {
    const texts = [
      r.name,
      number(viewers.get(r.name)),
      `${number(r.lag, 2)} s`,
      `${number(r.heard, 1)} s ago`,
      r.left_out ? 'silent: left out of totals' : '',
    ];
    row.classList.toggle('silent', r.left_out);
    cells.forEach((cell, i) => {
      cell.textContent = texts[i];
      cell.classList.toggle('number', i > 0 && i < 4);
    });
  });
}

/** An event as an item of a list. */
function happened({ at, text }) {
  const item = document.createElement('li');
  const time = document.createElement('time');
  const when = new Date(at);
  time.dateTime = when.toISOString();
  time.textContent = when.toLocaleString([], {
    day: 'numeric',
    month: 'short',
    hour: '2-digit',
    minute: '2-digit',
    second: '2-digit',
  });
  item.append(time, text);
  return item;
}

function showPages(pages) {
  listed = pages;
  const names = new Set(pages.map((p) => p.page));
  for (const name of history.keys()) if (!names.has(name)) history.delete(name);
  for (const { page, count } of pages) {
    const counts = history.get(page) ?? [];
    counts.push(count);
    if (counts.length > KEPT) counts.shift();
    history.set(page, counts);
  }
  drawPages();
}

let listed = []; // the pages of the last answer

/** Shows the pages whose name has what is searched for. */
function drawPages() {
  const wanted = $('search').querySelector('input').value.trim().toLowerCase();
  const pages = listed.filter((p) => p.page.toLowerCase().includes(wanted));
  $('pages-empty').hidden = listed.length > 0;
  $('pages-none').hidden = !wanted || pages.length > 0;
  const most = Math.max(...pages.map((p) => p.count), 1);
  rows($('pages'), pages, (p) => p.page, 4, ([name, count, line], p) => {
    if (!name.firstChild) name.append(...named(p.page));
    name.className = 'name';
    count.className = 'number bar';
    count.textContent = number(p.count);
    count.style.setProperty('--share', `${(100 * p.count) / most}%`);
    sparkline(drawing(line), history.get(p.page), KEPT);
  });
}

/** A page's name, which shows its past, and a link to it if the name is a path. */
function named(page) {
  const name = document.createElement('button');
  name.type = 'button';
  name.className = 'link';
  name.textContent = name.title = page;
  name.addEventListener('click', () => {
    past({ page });
    explain(page);
  });
  if (!/^\/(?![/\\])/.test(page)) return [name]; // //host and /\host lead to another host
  const link = document.createElement('a');
  link.href = page;
  link.textContent = '↗';
  link.setAttribute('aria-label', `open ${page}`);
  return [name, ' ', link];
}

/** Makes the rows of a table those of items, in their order; the same item keeps its row. */
function rows(body, items, name, columns, fill) {
  const known = new Map([...body.rows].map((row) => [row.dataset.name, row]));
  items.forEach((item, i) => {
    let row = known.get(name(item));
    known.delete(name(item));
    if (!row) {
      row = document.createElement('tr');
      row.dataset.name = name(item);
      for (let c = 0; c < columns; c++) row.insertCell();
    }
    if (body.rows[i] !== row) body.insertBefore(row, body.rows[i] ?? null);
    fill([...row.cells], item, row);
  });
  for (const row of known.values()) row.remove();
}

function age(since) {
  const seconds = Math.max(0, (Date.now() - since) / 1000);
  for (const [unit, size] of [
    ['d', 86_400],
    ['h', 3_600],
    ['min', 60],
  ])
    if (seconds >= 2 * size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.floor(seconds)} s`;
}

$('key').querySelector('form').addEventListener('submit', (event) => {
  event.preventDefault();
  key.value = $('key').querySelector('input').value;
  ask();
});
$('past').addEventListener('click', ({ target }) => {
  if (target.dataset.last) past({ last: target.dataset.last, step: target.dataset.step });
});
$('past-site').addEventListener('click', () => {
  past({ page: '*' });
  explain('*');
});
$('past-csv').addEventListener('click', () => {
  const columns = { from: 'at', 'greatest count': 'max', arrivals: 'joins' };
  if (isDay(shown.points[0])) Object.assign(columns, { 'mean count': 'avg', 'person-minutes': 'person_minutes', visitors: 'visitors' });
  const rows = shown.points.map((p) => [shown.page, ...Object.values(columns).map((name) => p[name])]);
  save('history.csv', [['page', ...Object.keys(columns)], ...rows]);
});
$('pages-csv').addEventListener('click', () => save('pages.csv', [['page', 'viewers'], ...listed.map((p) => [p.page, p.count])]));
$('search').addEventListener('input', drawPages);
$('search').addEventListener('submit', (event) => {
  event.preventDefault();
  const page = $('search').querySelector('input').value.trim();
  past({ page: page || '*' });
  explain(page || '*');
});
$('sites').querySelector('select').addEventListener('change', (event) => choose(event.target.value));
document.addEventListener('visibilitychange', ask);
ask();
setInterval(ask, ASK_MS);
setInterval(days, DAY_MS);

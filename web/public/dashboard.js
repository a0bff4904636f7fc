// The dashboard: asks once a second how everything is, and shows it.

import { key } from './key.js';
import { sparkline } from './plot.js';
import { remembered, summary } from './stats.js';

const ASK_MS = 1_000;
const KEPT = 120; // values of a sparkline
const DAY_MS = 60_000;
const DAYS = 20; // pages whose last day is shown: those with the most viewers

const $ = (id) => document.getElementById(id);
const number = (n, digits = 0) => (n === undefined ? '–' : n.toLocaleString('en', { maximumFractionDigits: digits }));

let last; // the answer before, for rates: {at, processes: Map}
const history = new Map(); // page -> its latest counts; as many pages as an answer has, at most 100

/** Draws the last day of the site, and of the pages with the most viewers. */
async function days() {
  if (document.hidden || $('board').hidden) return;
  const site = await remembered('*');
  $('site-day').toggleAttribute('hidden', !site?.peak.count);
  if (!site) return; // the server remembers nothing
  drawDay($('site-day'), site);
  $('site-summary').textContent = site.peak.count ? summary(site) : '';
  for (const row of [...$('pages').rows].slice(0, DAYS)) {
    const stats = await remembered(row.dataset.page);
    if (stats && row.isConnected) drawDay(drawing(row.cells[3]), stats);
  }
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
  const answer = fits ? await fetch('/-/dashboard/data', { headers: key.headers }).catch(() => undefined) : undefined;
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
  show(await answer.json());
  if (first) days();
  state('open', 'live');
}

function state(name, text) {
  $('state').dataset.state = name;
  $('state').textContent = text;
}

function show({ at, region, site, pages, processes, regions }) {
  if (last?.at === at) return; // it is kept for a second
  $('board').hidden = false;
  $('region').textContent = `region ${region}`;
  const before = last?.processes;
  const seconds = (at - (last?.at ?? at)) / 1000;
  last = { at, processes: new Map(processes.map((p) => [`${p.name} ${p.since}`, p.load])) };
  const rate = (process, metric) => {
    const old = before?.get(`${process.name} ${process.since}`)?.[metric];
    const now = process.load?.[metric];
    return old === undefined || now === undefined || seconds === 0 ? undefined : Math.max(0, now - old) / seconds;
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
      p.name, (p.roles ?? []).join(', ') || 'leaving', age(p.since), number(load.headcount_connections),
      number(rate(p, 'headcount_deliveries_total'), 1), number(rate(p, 'headcount_client_messages_total'), 1),
      number(load.headcount_users), number(load.headcount_partitions_owned), number(rate(p, 'headcount_store_changes_total'), 1),
      p.load && rate(p, 'process_cpu_seconds_total') !== undefined ? `${number(100 * rate(p, 'process_cpu_seconds_total'), 1)} %` : '–',
      p.load ? `${number(load.process_resident_memory_bytes / 2 ** 20)} MB` : 'no answer',
    ];
    row.classList.toggle('silent', !p.load);
    cells.forEach((cell, i) => {
      cell.textContent = texts[i];
      cell.classList.toggle('number', i > 1);
    });
  });
  $('regions-section').hidden = regions.length === 0;
  rows($('regions'), regions, (r) => r.name, 4, (cells, r, row) => {
    const texts = [r.name, `${number(r.lag, 2)} s`, `${number(r.heard, 1)} s ago`, r.left_out ? 'silent: left out of totals' : ''];
    row.classList.toggle('silent', r.left_out);
    cells.forEach((cell, i) => {
      cell.textContent = texts[i];
      cell.classList.toggle('number', i === 1 || i === 2);
    });
  });
}

function showPages(pages) {
  const names = new Set(pages.map((p) => p.page));
  for (const name of history.keys()) if (!names.has(name)) history.delete(name);
  $('pages-empty').hidden = pages.length > 0;
  rows($('pages'), pages, (p) => p.page, 4, ([name, viewers, line], { page, count }) => {
    const counts = history.get(page) ?? [];
    counts.push(count);
    if (counts.length > KEPT) counts.shift();
    history.set(page, counts);
    name.className = 'name';
    name.textContent = name.title = page;
    viewers.className = 'number';
    viewers.textContent = number(count);
    sparkline(drawing(line), counts, KEPT);
  });
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
  for (const [unit, size] of [['d', 86_400], ['h', 3_600], ['min', 60]]) if (seconds >= 2 * size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.floor(seconds)} s`;
}

$('key').querySelector('form').addEventListener('submit', (event) => {
  event.preventDefault();
  key.value = $('key').querySelector('input').value;
  ask();
});
document.addEventListener('visibilitychange', ask);
ask();
setInterval(ask, ASK_MS);
setInterval(days, DAY_MS);

// The demo page: one page's count in large, its last minutes as a line, the
// most viewed pages, its views and likes, a crowd on demand, and the bell.

import { at } from './at.js';
import { Crowd } from './crowd.js';
import { Headcount } from './headcount.js';
import { key } from './key.js';
import { watchTop } from './live-top.js';
import { Plot, sparkline } from './plot.js';
import { remembered, said, summary } from './stats.js';

// until there is something to list
const PAGES = ['demo', 'pricing', 'docs/getting started', 'blog/hello-world', 'café'];
const LISTED = 7;
const AGAIN_MS = 2_000;
const DAY_MS = 60_000;
const DAY_SOON_MS = 2_000;

const headcount = Headcount.shared; // the elements use the same one
const $ = (id) => document.getElementById(id);
const plot = new Plot($('chart'));

let page; // the page that this window is on

/** Moves this window to a page: being counted there is the <live-count>'s own doing. */
function show(next) {
  page = next;
  $('count').setAttribute('page', page);
  $('page').textContent = page;
  list();
  lasting();
  const path = at(`${encodeURIComponent(page)}/counter`);
  $('counter').href = path;
  $('counter').textContent = `GET ${new URL(path).pathname}`;
  title();
  plot.clear();
  past();
  day();
  day.timer = setTimeout(day, DAY_SOON_MS); // this window is in it then
  showFollow(false);
  asked = '';
}

/** Fills the line with the minutes before this window was opened. */
async function past() {
  const about = page;
  const stats = await remembered(about, 'last=10m&step=1m');
  if (!stats || about !== page) return;
  const running = Date.now() % 60_000; // how long the last of them lasts already
  const last = stats.points.length - 1;
  plot.begin(stats.points.map((point, i) => ({ ago: running + (last - i) * 60_000, count: point.max })));
}

let peak; // of the last day, as it was last shown; undefined: it is not known

/** Shows the last day, which a reload does not forget. */
async function day() {
  clearTimeout(day.timer);
  day.timer = 0;
  const about = page;
  const stats = await remembered(about);
  if (about !== page) return;
  peak = stats?.peak.count;
  $('day').hidden = !peak;
  if ($('day').hidden) return;
  sparkline($('day').querySelector('svg'), stats.points.map((point) => point.max), stats.points.length);
  $('day').querySelector('figcaption').textContent = summary(stats);
}

function title() {
  const count = $('count').count;
  document.title = count === undefined ? 'Headcount' : `${count.toLocaleString('en')} here · Headcount`;
  $('people').textContent = count === 1 ? 'person' : 'people';
}

function here() {
  const wanted = new URLSearchParams(location.search).get('page');
  // What cannot be a page would only show a dash.
  return wanted && wanted !== '*' && [...wanted].length <= 128 ? wanted : PAGES[0];
}

// ---- the most viewed pages

let top = [];
let unwatch = () => {};

/**
 * Follows which pages are viewed most. The server tells if it has no API key, if this page has it, or what --public-top
 * lets it.
 */
async function look() {
  const fits = await key.fits('top_needs_key');
  unwatch();
  $('examples').hidden = fits !== false;
  if (fits === undefined) setTimeout(look, AGAIN_MS);
  if (!fits) return;
  const follow = (pages) => {
    top = pages.map(({ page }) => page);
    list();
  };
  const failed = (_, refused) => {
    if (!refused || !key.value) return;
    key.value = ''; // it is wrong
    look();
  };
  unwatch = watchTop(follow, { n: LISTED, headers: key.headers, failed });
}

function list() {
  // This page is always listed. The examples fill up what nobody is on, unless the
  // key shows that this is somebody's site.
  const fill = key.value && top.length > 0 ? [] : PAGES;
  const listed = top.slice(0, LISTED);
  if (!listed.includes(page)) listed.splice(LISTED - 1, 1, page);
  const names = [...new Set([...listed, ...fill])].slice(0, LISTED);
  const known = new Map([...$('pages').children].map((item) => [item.dataset.page, item]));
  names.forEach((name, i) => {
    const item = known.get(name) ?? row(name);
    known.delete(name);
    const link = item.querySelector('a');
    if (name === page) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
    if ($('pages').children[i] !== item) $('pages').insertBefore(item, $('pages').children[i] ?? null);
  });
  for (const item of known.values()) item.remove();
}

function row(name) {
  const item = document.createElement('li');
  item.dataset.page = name;
  const link = document.createElement('a');
  link.dataset.page = name;
  link.href = at(`?page=${encodeURIComponent(name)}`);
  const label = document.createElement('span');
  label.textContent = name;
  const count = document.createElement('live-count');
  count.setAttribute('page', name);
  count.setAttribute('watch', '');
  count.addEventListener('count', bars);
  const bar = document.createElement('i');
  link.append(bar, label, count);
  item.append(link);
  return item;
}

/** Draws how the pages compare. */
function bars() {
  const counts = [...$('pages').querySelectorAll('live-count')];
  const most = Math.max(1, ...counts.map((c) => c.count ?? 0));
  for (const count of counts)
    count.parentElement.querySelector('i').style.setProperty('width', `${(100 * (count.count ?? 0)) / most}%`);
}

// Without a reload, which works too, the old page is left at once.
$('pages').addEventListener('click', (event) => {
  const link = event.target.closest('a');
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  if (link.dataset.page === page) return;
  history.pushState(null, '', link.href);
  show(link.dataset.page);
});
addEventListener('popstate', () => show(here()));

// ---- the connection

const STATES = {
  idle: 'connecting',
  connecting: 'connecting',
  open: 'live',
  waiting: 'reconnecting',
  refused: 'refused',
  closed: 'closed',
};

function showState() {
  $('state').dataset.state = headcount.state;
  $('state').textContent = STATES[headcount.state];
  // Nobody knows what happens while the connection is away: a gap in the line.
  if (headcount.state !== 'open') plot.add(null);
  else if ($('count').count !== undefined) plot.add($('count').count);
}

// ---- what lasts: views and likes

/** The key of a counter of this page; keys have no star, and at most 128 characters. */
const lastingKey = (kind) => [...`${kind}:${page.replaceAll('*', '_')}`].slice(0, 128).join('');

$('views').addEventListener(
  'counter',
  ({ detail }) => ($('views-word').textContent = detail.value === 1 ? 'view' : 'views'),
);

let viewed; // the page whose view was counted last

/** Shows the page's counters, and counts a view when this tab may do what the site's server does. */
function lasting() {
  for (const kind of ['views', 'likes']) $(kind).setAttribute('key', lastingKey(kind));
  const path = at(`api/v1/counters/views:${encodeURIComponent(lastingKey('views').slice(6))}/increment`);
  $('view').textContent = `curl -X POST -H 'X-API-Key: …' ${path}`;
  if (!key.value || viewed === page) return;
  viewed = page;
  fetch(path, { method: 'POST', headers: key.headers }).catch(() => {});
}

// ---- the crowd

const crowd = new Crowd(() => page, showCrowd);

function showCrowd() {
  const here = crowd.size === 1 ? '1 simulated viewer is here' : `${crowd.size} simulated viewers are here`;
  $('crowd-state').textContent = crowd.trouble
    ? `${here}. No more can come: ${crowd.trouble}.`
    : crowd.waiting > 0
      ? `${here}, ${crowd.waiting} on the way (the server admits ten per second) …`
      : crowd.size > 0 && crowd.room === 0
        ? `${here}. More than ${crowd.bound} connections one browser does not have.`
        : crowd.size > 0
          ? `${here}.`
          : gone;
  for (const button of $('crowd').querySelectorAll('button')) button.disabled = Number(button.value) > crowd.room;
  for (const button of $('uncrowd').querySelectorAll('button')) button.disabled = crowd.size + crowd.waiting === 0;
}

let gone = '';
$('crowd').addEventListener('click', ({ target }) => {
  if (!target.value) return;
  gone = '';
  crowd.bring(Number(target.value));
});
$('uncrowd').addEventListener('click', ({ target }) => {
  if (!target.value) return;
  gone =
    target.value === 'leave'
      ? 'They left. The server stopped counting them at once.'
      : 'Their connections were cut. The server counts each of them for two more seconds (leave-grace), in case they return.';
  crowd.disperse(target.value === 'leave');
});

// ---- the bell

const following = () => $('follow').getAttribute('aria-pressed') === 'true';

function showFollow(yes) {
  $('follow').setAttribute('aria-pressed', yes);
  $('follow').textContent = yes ? 'You follow this page' : 'Follow this page';
}

let asked; // the page that was asked about

/** Finds out whether this page is followed, when somebody seems to want to know. */
async function follows() {
  if (asked === page) return;
  asked = page;
  const about = page;
  let after = '';
  do {
    const answer = await fetch(at(`-/me/follows${after && `?after=${encodeURIComponent(after)}`}`)).catch(
      () => undefined,
    );
    const list = await said(answer);
    if (!list || about !== page) return;
    const { follows, next } = list;
    if (follows.includes(about)) return showFollow(true);
    after = next;
  } while (after);
}

for (const type of ['pointerover', 'focusin']) $('unread').addEventListener(type, follows);

/** Says why an answer was none; undefined is no answer. */
async function complain(answer) {
  const problem = await answer?.json().catch(() => ({}));
  $('unread-state').textContent = answer
    ? (problem.detail ?? problem.title ?? `The server answered with status ${answer.status}.`)
    : 'The server did not answer.';
}

$('follow').addEventListener('click', async () => {
  const yes = !following();
  const answer = await fetch(at(`-/me/follows/${encodeURIComponent(page)}`), { method: yes ? 'PUT' : 'DELETE' }).catch(
    () => undefined,
  );
  if (answer?.status !== 204) return complain(answer); // a proxy may answer with its log-in page
  showFollow(yes);
  $('unread-state').textContent = yes ? 'The bell now counts the changes of this page.' : '';
});

/** Asks for the API key below an element, to do something with it. */
function askKey(below, then) {
  below.after($('key'));
  $('key').hidden = false;
  $('key').querySelector('input').focus();
  withKey = then;
}

let withKey = () => {};

async function modify() {
  $('key').hidden = key.value !== '';
  if (!key.value) {
    $('unread-state').textContent = 'Only a server of the site may report a change. Enter its API key to do it here.';
    askKey($('unread').querySelector('.buttons'), modify);
    return;
  }
  const answer = await fetch(at(`${encodeURIComponent(page)}/changes`), { method: 'POST', headers: key.headers }).catch(
    () => undefined,
  );
  if (answer?.status === 401) {
    key.value = '';
    askKey($('unread').querySelector('.buttons'), modify);
  }
  if (!answer?.ok) return complain(answer);
  $('unread-state').textContent = following()
    ? 'Modified. Look at the bell.'
    : 'Modified. Its followers were notified; you do not follow this page.';
}

$('modify').addEventListener('click', modify);
$('enter').addEventListener('click', () => askKey($('examples'), look));
$('key').addEventListener('submit', (event) => {
  event.preventDefault();
  key.value = $('key').querySelector('input').value;
  $('key').hidden = true;
  withKey();
  look();
  lasting();
});

// ---- what each region has of the count, when there are several

async function showParts() {
  const asked = page;
  const answer = await fetch(at(`${encodeURIComponent(asked)}/counter?regions=1`), {
    headers: { Accept: 'application/json' },
  }).catch(() => null);
  const { regions = {} } = (await said(answer)) ?? {};
  const parts = Object.entries(regions);
  showParts.alone = parts.length === 1; // one region: there is nothing more to ask
  if (asked !== page) return;
  $('parts').hidden = parts.length < 2;
  $('parts').textContent = parts.map(([name, users]) => `${name} ${users.toLocaleString('en')}`).join(' · ');
}

// ---- a second person on the same machine

function offerTwin() {
  // Cookies belong to a host: under its other name this machine is another one.
  const other = { localhost: '127.0.0.1', '127.0.0.1': 'localhost' }[location.hostname];
  if (!other) return;
  const link = $('twin').querySelector('a');
  const address = () => {
    const url = new URL(location.href);
    url.hostname = other;
    return url;
  };
  link.href = address();
  link.addEventListener('click', () => (link.href = address()));
  $('twin').querySelector('span').textContent = address().host;
  $('twin').hidden = false;
}

$('snippet').textContent =
  `<script type="module" src="${at('-/headcount.js')}"></script>\n` +
  `<live-count singular="# person is reading this page" other="# people are reading this page"></live-count>\n` +
  `<unread-bell></unread-bell> <like-button counter="likes:42"></like-button>`;
$('copy').addEventListener('click', async () => {
  // A page that did not come over HTTPS, or from this machine, may not write to the clipboard: then the text is
  // selected.
  const copied = await navigator.clipboard?.writeText($('snippet').textContent).then(
    () => true,
    () => false,
  );
  if (!copied) getSelection().selectAllChildren($('snippet'));
  $('copy').textContent = copied ? 'Copied' : 'Selected';
  setTimeout(() => ($('copy').textContent = 'Copy'), 2_000);
});
$('count').addEventListener('count', ({ detail }) => {
  $('count').parentElement.style.setProperty('--digits', detail.count.toLocaleString('en').length);
  plot.add(detail.count);
  title();
  if (detail.count > peak) day.timer ||= setTimeout(day, DAY_SOON_MS); // the sentence about the day would be wrong
  clearTimeout(showParts.timer);
  if (!showParts.alone) showParts.timer = setTimeout(showParts, 100);
});
headcount.addEventListener('state', showState);
offerTwin();
show(here());
showState();
showCrowd();
look();
setInterval(() => document.hidden || day(), DAY_MS);
setInterval(() => document.hidden || plot.draw(), 1_000);

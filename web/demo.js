// The demo page: one page's count in large, its last minutes as a line, the
// other pages' counts, and a crowd on demand.

import { Headcount } from './headcount.js';

const PAGES = ['demo', 'pricing', 'docs/getting started', 'blog/hello-world', 'café'];
const headcount = Headcount.shared; // <live-count> uses the same one
const $ = (id) => document.getElementById(id);

let page; // the page that this window is on

/** Moves this window to a page: being counted there is the <live-count>'s own doing. */
function show(next) {
  page = next;
  $('count').setAttribute('page', page);
  $('page').textContent = page;
  for (const link of $('pages').querySelectorAll('a')) {
    if (link.dataset.page === page) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  const path = `/${encodeURIComponent(page)}/counter`;
  $('counter').href = path;
  $('counter').textContent = `GET ${path}`;
  title();
  chart.clear();
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

function listPages() {
  const names = PAGES.includes(here()) ? PAGES : [here(), ...PAGES];
  for (const name of names) {
    const link = document.createElement('a');
    link.dataset.page = name;
    link.href = `/?page=${encodeURIComponent(name)}`;
    const label = document.createElement('span');
    label.textContent = name;
    const count = document.createElement('live-count');
    count.setAttribute('page', name);
    count.setAttribute('watch', '');
    link.append(label, count);
    const item = document.createElement('li');
    item.append(link);
    $('pages').append(item);
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
}

// ---- the connection

const STATES = { idle: 'connecting', connecting: 'connecting', open: 'live', waiting: 'reconnecting', closed: 'closed' };

function showState() {
  $('state').dataset.state = headcount.state;
  $('state').textContent = STATES[headcount.state];
  // Nobody knows what happens while the connection is away: a gap in the line.
  if (headcount.state !== 'open') chart.add(null);
  else if ($('count').count !== undefined) chart.add($('count').count);
}

// ---- the line of the last minutes

const chart = {
  points: [], // {at, count}: each holds until the next; a null count is a gap
  bound: 2_000, // beyond that the oldest go; more than four a second do not come
  spans: [
    [30_000, '30 seconds ago'], // the stretch of time that is shown grows with what there is to show
    [60_000, '1 minute ago'],
    [120_000, '2 minutes ago'],
    [300_000, '5 minutes ago'],
  ],

  clear() {
    this.points = [];
    this.draw();
  },

  add(count) {
    if (this.points.at(-1)?.count === count) return;
    this.points.push({ at: performance.now(), count });
    this.draw();
  },

  draw() {
    const now = performance.now();
    const points = this.points;
    // The first point may lie before the stretch: its count reaches into it.
    const most = this.spans.at(-1)[0];
    while (points.length > this.bound || (points.length > 1 && points[1].at < now - most)) points.shift();
    const age = Math.min(now - (points[0]?.at ?? now), most);
    const [span, since] = this.spans.find(([span]) => age <= span);
    const top = Math.max(4, ...points.map((p) => p.count ?? 0)) * 1.15;
    const x = (at) => (600 * Math.max(0, 1 - (now - at) / span)).toFixed(1);
    const y = (count) => (100 * (1 - count / top)).toFixed(1);

    let line = '';
    let area = '';
    points.forEach(({ at, count }, i) => {
      if (count === null) return;
      const from = x(at);
      const to = x(points[i + 1]?.at ?? now);
      const joins = i > 0 && points[i - 1].count !== null;
      line += `${joins ? 'V' : `M${from} `}${y(count)}H${to}`;
      area += `M${from} 100V${y(count)}H${to}V100Z`;
    });
    $('chart').querySelector('.line').setAttribute('d', line);
    $('chart').querySelector('.area').setAttribute('d', area);
    $('since').textContent = since;
  },
};

// ---- the crowd
//
// Each simulated viewer is a hold: a PUT without any identity, for which the
// server makes up a new anonymous user, counted until the hold ends by itself
// after three presence timeouts. WebSockets would not do: a browser sends its
// one cookie with each of them, so a thousand of them are one person, and the
// ids that would tell them apart come in cookies that no script may read. For
// the same reason a hold can be neither renewed nor taken back from here.

const crowd = {
  waiting: 0, // viewers still to come
  bound: 200, // beyond that the buttons rest
  sent: 0,
  // The server lets 100 nameless callers of one address in at once, and ten a
  // second after that. Keeping a little under it saves us most refusals.
  credit: 90,
  rate: 9,
  running: false,
  trouble: '',

  bring(number) {
    this.waiting += number;
    this.trouble = '';
    this.show();
    this.run();
  },

  async run() {
    if (this.running) return;
    this.running = true;
    while (this.waiting > 0) {
      while (this.credit < 1) await sleep(100);
      const batch = Math.min(this.waiting, Math.floor(this.credit), 6); // a browser sends no more at a time
      this.credit -= batch;
      this.waiting -= batch;
      await Promise.all(Array.from({ length: batch }, () => this.one(page)));
      this.show();
    }
    this.running = false;
    this.show();
  },

  async one(page) {
    try {
      const answer = await fetch(`/${encodeURIComponent(page)}/counter`, {
        method: 'PUT',
        credentials: 'omit', // no cookie: someone new
        headers: { 'Content-Type': 'application/json' },
        body: '{"action":"increment"}',
      });
      if (answer.ok) {
        this.sent++;
        return;
      }
      if (answer.status === 429 || answer.status === 503) {
        this.waiting++;
        const seconds = Number(answer.headers.get('Retry-After')) || 1;
        await sleep(Math.min(seconds, 30) * 1_000);
        return;
      }
      const problem = await answer.json().catch(() => ({}));
      this.stop(problem.detail ?? problem.title ?? `the server answers ${answer.status}`);
    } catch {
      this.stop('the server does not answer');
    }
  },

  stop(trouble) {
    this.waiting = 0;
    this.trouble = trouble;
  },

  show() {
    const come = `${this.sent} came`;
    $('crowd-state').textContent = this.trouble
      ? `${come}; no more: ${this.trouble}.`
      : this.waiting > 0
        ? `${come}, ${this.waiting} to come (the server lets ten a second in) …`
        : this.sent > 0
          ? `${come}, and go again by themselves.`
          : '';
    for (const button of $('crowd').querySelectorAll('button'))
      button.disabled = this.waiting + Number(button.value) > this.bound;
  },
};

function sleep(ms) {
  return new Promise((wake) => setTimeout(wake, ms));
}

// ---- what each region has of the count, when there are several

async function showParts() {
  const asked = page;
  const answer = await fetch(`/${encodeURIComponent(asked)}/counter?regions=1`, { headers: { Accept: 'application/json' } }).catch(() => null);
  const { regions = {} } = answer?.ok ? await answer.json() : {};
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
  `<script type="module" src="${location.origin}/-/headcount.js"></script>\n` +
  `<live-count></live-count> people are reading this page.`;
$('crowd').addEventListener('click', ({ target }) => target.value && crowd.bring(Number(target.value)));
$('count').addEventListener('count', ({ detail }) => {
  chart.add(detail.count);
  title();
  clearTimeout(showParts.timer);
  if (!showParts.alone) showParts.timer = setTimeout(showParts, 100);
});
headcount.addEventListener('state', showState);
listPages();
offerTwin();
show(here());
showState();
setInterval(() => {
  crowd.credit = Math.min(90, crowd.credit + crowd.rate / 2);
}, 500);
setInterval(() => document.hidden || chart.draw(), 1_000);

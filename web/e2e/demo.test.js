// The demo page and <live-count> in a real Chromium against a real server.
//
//   CHROMIUM       the browser, if not the one of the PATH
//   HEADCOUNT_BIN  the server, if it is not to be built here
//   SCREENSHOT     where to write a picture of the demo page
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { readFile } from 'node:fs/promises';
import { after, afterEach, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { promisify } from 'node:util';

import {
  GRACE,
  LEAVE_GRACE,
  TIMEOUT,
  eventually,
  expectComplaints,
  expectCount,
  expectState,
  launch,
  open as openIn,
  record,
  recorded,
  shown,
  startSite,
} from './browser.js';
import { Server, program } from './server.js';

const KEY = 'a key for tests alone';

let binary;
let server;
let browser;
let site; // a customer's site, on another origin
let showcase; // the window that the picture is taken of
let visitors; // those who come and go there
const windows = [];

before(
  async () => {
    binary = await program();
    site = await startSite((url) => `<!doctype html><html lang="de"><title>Shop</title>
      <link rel="canonical" href="/caf%C3%A9?no=query">
      <script type="module" src="${url.searchParams.get('from')}/-/headcount.js"></script>
      <p><live-count id="here">…</live-count> here, <live-count id="other" page="elsewhere" watch></live-count> there`);
    server = await Server.start(binary.path, [
      '--allow-origins',
      site.url,
      ...GRACE,
      '--shutdown-timeout',
      '2s',
      '--api-key',
      KEY,
      '--presence-timeout',
      '2m',
    ]); // holds last for three times as long: none ends while a test counts them
    browser = await launch();
    // This is opened first, while people come and go, so that its line shows something.
    showcase = await open('/', { viewport: { width: 1280, height: 715 } }, undefined, withKey);
    visitors = comeAndGo('demo');
  },
  { timeout: 600_000 },
);

afterEach(() => {
  for (const page of windows) assert.deepEqual(page.complaints, [], page.url());
});

after(async () => {
  await visitors?.stop().catch(() => {}); // the test that awaits it says what is wrong
  await browser?.close();
  site?.close();
  try {
    await server?.stop();
  } finally {
    await binary?.remove();
  }
}, { timeout: TIMEOUT });

/** Lets viewers come to a page and leave it, up to 30 of them, until it is stopped. */
function comeAndGo(page) {
  const here = [];
  let stopped = false;
  const done = (async () => {
    for (let i = 0; !stopped; i++) {
      const want = Math.round(15 - 9 * Math.cos(i / 9) + 6 * Math.sin(i / 3.1));
      if (here.length < want) here.push(await server.hold(page));
      if (here.length > want) await here.shift()();
      await sleep(150);
    }
  })();
  return { stop: () => ((stopped = true), done) };
}

/** A new person's window, or with a context another tab of theirs. */
async function open(address, options = {}, context = undefined, prepare = undefined) {
  const page = await openIn(context ?? (await browser.newContext(options)), new URL(address, server.url).href, prepare);
  windows.push(page);
  return page;
}

/** A new anonymous user likes a page. */
const like = (page) => fetch(`${server.url}/api/v1/counters/likes%3A${page}/members/me`, { method: 'PUT' });

const demo = (page) => `/?page=${page}`;
const withKey = (page) => page.addInitScript((key) => sessionStorage.setItem('headcount_api_key', key), KEY);

test('a page that the browser kept for "back" is counted again', async () => {
  const other = await open(demo('cached'));
  const one = await open(demo('cached'));
  await expectCount(other, 2);
  await one.evaluate(() => addEventListener('pageshow', ({ persisted }) => (window.restored = persisted)));
  await one.goto(new URL(demo('cached-next'), server.url).href);
  await expectCount(other, 1);
  // Not goBack: that waits for a load, and a page that was kept does not load.
  await one.evaluate(() => void setTimeout(() => history.back()));
  await expectCount(other, 2);
  assert.equal(await one.evaluate(() => window.restored), true);
  await expectState(one, 'live');
  await one.context().close();
  await other.context().close();
});

test('the pages of the list can be visited one after the other, there and back', async () => {
  const one = await open('/?page=walk');
  await expectCount(one, 1);
  await one.click('#pages a[data-page="docs/getting started"]');
  assert.equal(await one.evaluate(() => location.search), '?page=docs%2Fgetting%20started');
  await eventually(0, 'on the page before', () => server.count('walk'));
  await eventually(1, 'on the next page', () => server.count('docs/getting started'));
  await expectCount(one, 1);
  await one.goBack();
  await eventually('walk', 'the page is', () => one.innerText('#page'));
  await eventually(1, 'back on the page before', () => server.count('walk'));
  await expectCount(one, 1);
  await one.context().close();
});

test('<live-count> on a site of another origin', async () => {
  const address = `${site.url}/?from=${encodeURIComponent(server.url)}`;
  const one = await open(address);
  await expectCount(one, 1, 'here');
  assert.equal(await server.count('/café?no=query'), 1, 'the canonical path with its query, readable');
  await expectCount(one, 0, 'other');
  assert.equal(await server.count('elsewhere'), 0, 'who watches is not counted');

  const two = await open(address);
  await expectCount(one, 2, 'here');
  assert.deepEqual(
    await one.evaluate(() => {
      const number = document.getElementById('here').shadowRoot.querySelector('[part~=count]');
      return [number.textContent, number.part.contains('offline'), getComputedStyle(number).opacity];
    }),
    ['2', false, '1'],
  );
  // No cookie is sent to another origin. The id that the page keeps makes the reload the same person.
  await record(one, 'here');
  await expectCount(two, 2, 'here'); // it knows its id then
  await two.reload();
  await expectCount(two, 2, 'here');
  await sleep(LEAVE_GRACE + 500);
  assert.deepEqual(await recorded(one), [2]);

  await one.evaluate(() => document.getElementById('here').setAttribute('watch', ''));
  await expectCount(two, 1, 'here');
  await one.evaluate(() => document.getElementById('here').setAttribute('page', 'elsewhere'));
  await one.evaluate(() => document.getElementById('here').removeAttribute('watch'));
  await expectCount(one, 1, 'other');
  await one.evaluate(() => document.getElementById('here').remove());
  await expectCount(one, 0, 'other');
  await one.context().close();
  await two.context().close();
});

test('on screens of all sizes nothing is wider than the screen', async () => {
  for (const address of [demo('a'.repeat(128)), '/-/dashboard']) {
    const page = await open(address, {}, undefined, withKey);
    if (address === '/-/dashboard') await expectComplaints(page, /401/); // of the address alone
    for (const width of [320, 390, 768, 1024, 1920]) {
      await page.setViewportSize({ width, height: 700 });
      if (address === '/-/dashboard') await page.waitForSelector('#processes tr');
      else await expectCount(page, 1);
      assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= width, `${address} at ${width}`);
    }
    await page.context().close();
  }
});

test('a busy site, and a picture of it', async () => {
  await visitors.stop();
  while ((await server.count('demo')) < 17) await server.hold('demo');
  const crowds = { pricing: 4, 'docs/getting started': 7, 'blog/hello-world': 2, café: 3 };
  for (const [page, viewers] of Object.entries(crowds)) {
    for (let i = 0; i < viewers; i++) {
      await server.hold(page);
      await sleep(40);
    }
  }
  await sleep(LEAVE_GRACE); // the windows of other tests are gone
  await eventually(
    true,
    'the window shows what the server says',
    async () => (await shown(showcase)) === (await server.count('demo')),
  );
  for (const [page, viewers] of Object.entries(crowds)) {
    const number = await showcase.waitForSelector(`#pages a[data-page="${page}"] live-count`);
    await eventually(viewers, page, () => number.evaluate((element) => element.count));
  }
  await eventually(
    true,
    'the site is shown',
    async () => (await shown(showcase, 'site')) === (await server.count('*')),
  );
  await fetch(`${server.url}/api/v1/counters/views:demo/increment`, {
    method: 'POST', headers: { 'X-API-Key': KEY, 'Content-Type': 'application/json' }, body: '{"delta":1233}',
  });
  await expectCount(showcase, 1_234, 'views'); // its own view is one of them
  for (let i = 0; i < 7; i++) await like('demo');
  await expectCount(showcase, 7, 'likes');
  await showcase.click('#likes');
  await showcase.mouse.move(0, 0);
  await expectCount(showcase, 8, 'likes');
  await showcase.waitForFunction(
    () =>
      Number(/at most (\d+)/.exec(document.getElementById('day').textContent)?.[1]) >=
      document.getElementById('count').count,
  );
  await showcase.screenshot({ path: process.env.SCREENSHOT || undefined });
});

test('a simulated crowd comes, each with an identity, and goes with and without a leave', async () => {
  const one = await open(demo('crowd'));
  await expectCount(one, 1);
  await one.click('#crowd button[value="1"]');
  await expectCount(one, 2);
  await one.click('#crowd button[value="10"]');
  await expectCount(one, 12);
  await one.waitForFunction(
    () => document.getElementById('crowd-state').textContent === '11 simulated viewers are here.',
  );
  assert.notEqual(await one.getAttribute('#chart .line', 'd'), '');

  const killed = Date.now();
  await one.click('#uncrowd button[value="kill"]');
  await sleep(LEAVE_GRACE / 2);
  const meanwhile = await shown(one);
  if (Date.now() - killed < LEAVE_GRACE) assert.equal(meanwhile, 12, 'who is gone without a word may come back');
  await expectCount(one, 1);
  assert.ok(Date.now() - killed >= LEAVE_GRACE);

  await one.click('#crowd button[value="10"]');
  await expectCount(one, 11);
  await one.waitForFunction(
    () => document.getElementById('crowd-state').textContent === '10 simulated viewers are here.',
  );
  await one.click('#uncrowd button[value="leave"]');
  await expectCount(one, 1);
  await one.waitForFunction(() => /^They left\./.test(document.getElementById('crowd-state').textContent));
  await one.context().close();
});

test('the key may be in the address, the snippet can be copied, and seven digits fit on a telephone', async () => {
  const one = await open(`/?page=telephone#key=${encodeURIComponent(KEY)}`, { viewport: { width: 390, height: 800 } });
  await expectCount(one, 1);
  assert.equal(await one.evaluate(() => location.hash), '');
  assert.equal(await one.isVisible('#examples'), false);
  await one.click('#copy');
  await one.waitForFunction(() => /^(Copied|Selected)$/.test(document.getElementById('copy').textContent));
  await one.keyboard.press('Shift+Tab'); // from the button to the snippet, which is wider than the screen
  assert.equal(await one.getByRole('region', { name: 'Code to copy' }).and(one.locator(':focus')).count(), 1);
  await one.keyboard.press('ArrowRight');
  await one.waitForFunction(() => document.activeElement.scrollLeft > 0);
  const fits = await one.evaluate(() => {
    const number = document.querySelector('.now .number');
    number.style.setProperty('--digits', '1,234,567'.length);
    number.textContent = '1,234,567';
    const range = document.createRange();
    range.selectNodeContents(number);
    return (
      range.getBoundingClientRect().width <= number.getBoundingClientRect().width &&
      document.documentElement.scrollWidth <= 390
    );
  });
  assert.ok(fits);
  if (process.env.SCREENSHOT_TELEPHONE) await one.screenshot({ path: process.env.SCREENSHOT_TELEPHONE });
  await one.context().close();
});

test('the most viewed pages come first, for those who have the key', async () => {
  const leave = await Promise.all(Array.from({ length: 9 }, () => server.hold('popular')));
  const one = await open(demo('lonely'));
  await expectCount(one, 1);
  assert.match(await one.innerText('#examples'), /API key/);
  assert.equal(await one.$('#pages a[data-page="popular"]'), null);
  await one.click('#enter');
  await one.fill('#key input', KEY);
  await one.keyboard.press('Enter');
  await one.waitForSelector('#pages a[data-page="popular"]');
  await one.waitForFunction(() => document.querySelector('#pages a[data-page="popular"] live-count').count === 9);
  const names = await one.$$eval('#pages a', (links) => links.map((link) => link.dataset.page));
  assert.ok(names.indexOf('popular') < names.indexOf('lonely'), names.join());
  assert.equal(await one.isVisible('#examples'), false);
  assert.equal(await one.isVisible('#key'), false);
  await Promise.all(leave.map((step) => step()));
  await one.context().close();
});

test('a reload shows what the page remembers', async () => {
  const leave = [await server.hold('remembered'), await server.hold('remembered')];
  const one = await open(demo('remembered'));
  await expectCount(one, 3);
  await Promise.all(leave.map((step) => step()));
  await expectCount(one, 1);
  await one.reload();
  // A cache may have answered with what was asked before everybody was there; the page asks again soon.
  await one.waitForFunction(() =>
    /at most 3 at \d\d:\d\d.*, 3 visitors/.test(document.getElementById('day').innerText),
  );
  assert.match(await one.getAttribute('#day svg path', 'd'), /^M/);
  await one.evaluate(() => document.querySelector('#pages a[data-page="pricing"]').click()); // whose past is another
  await one.waitForFunction(() => !document.getElementById('day').innerText.includes('at most 3'));
  await one.context().close();
});

test('the dashboard shows pages, processes and their load to those who have the key', async () => {
  const viewer = await open(demo('watched'));
  await expectCount(viewer, 1);
  const board = await open('/-/dashboard');
  await expectComplaints(board, /401/); // the status says that a key is needed
  await board.waitForSelector('#key form');
  assert.equal(await board.isVisible('#board'), false);
  assert.equal(await board.getByRole('heading', { level: 1, name: 'Dashboard' }).count(), 1);
  await board.fill('#key input', 'wrong');
  await board.click('#key button');
  await board.waitForFunction(() => /does not know this key/.test(document.getElementById('trouble').textContent));
  await expectComplaints(board, /401/);
  await board.fill('#key input', KEY);
  await board.click('#key button');

  const cells = (name) => board.$$eval(`tr[data-name="${name}"] td`, (cells) => cells.map((cell) => cell.textContent));
  await board.waitForSelector('#pages tr[data-name="watched"]');
  assert.equal((await cells('watched'))[1], '1');
  assert.deepEqual((await cells('local')).slice(0, 2), ['local', 'gateway, presence, dispatcher']);
  // People of other tests are still leaving.
  await eventually(
    true,
    'connections are shown',
    async () => Number((await cells('local'))[3]) === (await server.connections()),
  );
  await eventually(
    true,
    'the site is shown',
    async () => Number(await board.innerText('#site')) === (await server.count('*')),
  );
  const leave = await server.hold('watched');
  await board.waitForFunction(
    () => document.querySelector('tr[data-name="watched"] td:nth-child(2)').textContent === '2',
  );
  await board.waitForFunction(
    () => parseFloat(document.querySelector('tr[data-name="local"] td:nth-child(5)').textContent) > 0,
  );
  const line = () => board.getAttribute('tr[data-name="watched"] svg path', 'd');
  const before = await line();
  await eventually('All is well: the store and 1 process answer.', 'the sentence is', () => board.innerText('#well'));
  await board.waitForSelector('#past-chart path.line');
  assert.match(await board.innerText('#past-summary'), /^Last 24 hours: at most/);
  for (const days of [7, 30, 365]) {
    await board.click(`#past [data-last="${days}d"]`);
    const said = new RegExp(`^Last ${days} days: at most [\\d,]+ on .+, \\d+ visitors on a day with any, [\\d,]+ person-hours$`);
    await eventually(true, 'the days are summed up', async () => said.test(await board.innerText('#past-summary')));
    await board.waitForSelector('#past-chart path.mean');
  }
  assert.deepEqual(
    board.complaints.filter((said) => !/401/.test(said)),
    [],
  ); // a refusal of the wrong key may be noted late
  await board.click('#past [data-last="24h"]');
  await board.click('tr[data-name="watched"] button');
  await board.waitForFunction(() => document.getElementById('past-title').textContent === 'watched');
  await board.waitForFunction(() => /^watched: \d+ now: 1 with a connection \(1 in all\) · \d+ by a hold alone · /.test(document.getElementById('explained').textContent));
  const files = async (button) => {
    const [download] = await Promise.all([board.waitForEvent('download'), board.click(button)]);
    return (await readFile(await download.path(), 'utf8')).split('\r\n');
  };
  const ranking = await files('#pages-csv');
  assert.equal(ranking[0], 'page,viewers');
  assert.ok(ranking.includes('watched,2'), ranking.join());
  assert.deepEqual(
    [(await files('#past-csv'))[0], (await files('#past-csv')).length],
    ['page,from,greatest count,arrivals', 291],
  );
  await board.click('#past-site');
  await board.fill('#search input', 'no page has this name');
  await board.waitForSelector('#pages-none:not([hidden])');
  await board.fill('#search input', 'WATCH');
  await board.waitForSelector('tr[data-name="watched"]');
  assert.match(await board.innerText('#events'), /This process, local, has started\./);
  await eventually(true, 'the line goes on', async () => (await line()) !== before);
  await leave();
  if (process.env.SCREENSHOT_DASHBOARD)
    await board.screenshot({ path: process.env.SCREENSHOT_DASHBOARD, fullPage: true });
  await board.context().close();
  await viewer.context().close();
});

test('the dashboard shows one site at a time, and those that the key holds for', async () => {
  const sites = ['--site', 'shop=https://shop.example', '--site', 'blog=https://blog.example'];
  const two = await Server.start(binary.path, [
    ...sites,
    '--api-key',
    KEY,
    '--api-key',
    `blog:${KEY} of the blog`,
    '--shutdown-timeout',
    '2s',
    '--presence-timeout',
    '2m',
  ]); // as above
  try {
    const hold = (site, page) =>
      fetch(`${two.url}/${page}/counter?site=${site}`, { method: 'PUT', body: '{"action":"increment"}' });
    for (const [site, page] of [
      ['shop', 'cart'],
      ['shop', 'cart'],
      ['blog', 'post'],
    ])
      assert.equal((await hold(site, page)).status, 200);
    const board = await open(`${two.url}/-/dashboard`, {}, undefined, withKey);
    await board.waitForSelector('#pages tr[data-name="cart"]');
    await expectComplaints(board, /401/); // of the address alone
    await eventually('2', 'on the site', () => board.innerText('#site'));
    assert.deepEqual(await board.$$eval('#sites option', (options) => options.map((option) => option.value)), [
      'shop',
      'blog',
    ]);
    await board.selectOption('#sites select', 'blog');
    await board.waitForSelector('#pages tr[data-name="post"]');
    await eventually('1', 'on the other site', () => board.innerText('#site'));
    assert.equal(await board.$('#pages tr[data-name="cart"]'), null);
    await board.context().close();

    const own = (page) =>
      page.addInitScript((key) => sessionStorage.setItem('headcount_api_key', key), `${KEY} of the blog`);
    const blog = await open(`${two.url}/-/dashboard`, {}, undefined, own);
    await blog.waitForSelector('#pages tr[data-name="post"]');
    await expectComplaints(blog, /401/, /403/); // of the address, and of the first site
    assert.equal(await blog.isVisible('#sites'), false);
    await blog.context().close();
  } finally {
    await two.stop();
  }
});

test('below a path demo and dashboard work, and so do names that are encoded', async () => {
  const below = await Server.start(binary.path, ['--base-path', '/live', '--api-key', KEY, '--shutdown-timeout', '2s']);
  try {
    const viewer = await open(`${below.url}/live/?page=a%2Fb%25`);
    await expectCount(viewer, 1);
    const board = await open(`${below.url}/live/-/dashboard`, {}, undefined, withKey);
    await board.waitForSelector('#pages tr[data-name="a/b%"]');
    await board.waitForSelector('#past-chart path.line');
    assert.deepEqual(board.complaints.filter((said) => !/401/.test(said)), []);
    await expectComplaints(board, /401/); // of the address alone
    await board.context().close();
    await viewer.context().close();
  } finally {
    await below.stop();
  }
});

test('views and likes of a page are live, and the command on the page counts a view', async () => {
  const one = await open(demo('lasting'));
  const two = await open(demo('lasting'), {}, undefined, withKey); // has the key, so it counts its view
  await Promise.all([one, two].map((page) => expectCount(page, 1, 'views')));
  await one.click('#likes');
  await Promise.all([one, two].map((page) => expectCount(page, 1, 'likes')));
  const command = (await one.innerText('#view')).replace('…', KEY);
  await promisify(execFile)('sh', ['-c', command]);
  await Promise.all([one, two].map((page) => expectCount(page, 2, 'views')));
  await two.click('#pages a[data-page="lasting"]');
  await expectCount(two, 2, 'views');
  await one.evaluate(() => document.querySelector('#pages a[data-page="pricing"]').click());
  await expectCount(one, 0, 'likes');
  for (const page of [one, two]) await page.context().close();
});

test('the bell shows a number, and its list reads all', async () => {
  const sent = [];
  const asked = [];
  let toPage;
  const one = await open(demo('news'), {}, undefined, async (page) => {
    // The test itself sends here what a server says about unread notifications, at once.
    await page.routeWebSocket(/\/-\/ws/, (socket) => {
      toPage = socket;
      const server = socket.connectToServer();
      socket.onMessage((text) => (JSON.parse(text).type === 'read' ? (sent.push(text), say(0)) : server.send(text)));
      server.onMessage((text) => JSON.parse(text).type !== 'unread' && socket.send(text));
    });
    await page.route(/\/-\/me\/notifications/, (route) =>
      route.fulfill({
        json: {
          count: 1234,
          notifications: [{ page: 'news', count: 1234, updated_at: '2030-10-10T12:11:42Z', title: 'New' }],
        },
      }),
    );
    await page.route(/\/-\/me\/follows|\/changes$/, async (route) => {
      const request = route.request();
      asked.push(
        `${request.method()} ${new URL(request.url()).pathname} ${request.headers()['x-api-key'] ?? ''}`.trim(),
      );
      if (request.method() === 'GET') return route.fulfill({ json: { follows: [] } });
      if (request.method() === 'POST') say(2);
      return route.fulfill({ status: 204 });
    });
  });
  const say = (count) => toPage.send(JSON.stringify({ type: 'unread', count }));
  const badge = () => one.evaluate(() => {
    const number = document.getElementById('bell').shadowRoot.querySelector('[part~=count]');
    return number.hidden ? '' : number.textContent;
  });
  await expectCount(one, 1);
  const button = one.getByRole('button', { name: /^Notifications/ });
  assert.equal(await badge(), '');
  await one.click('#follow');
  await one.waitForFunction(() => document.getElementById('follow').getAttribute('aria-pressed') === 'true');
  await one.click('#modify');
  await one.fill('#key input', KEY);
  await one.click('#key button');
  await one.waitForFunction(() => document.getElementById('bell').count === 2);
  assert.equal(await badge(), '2');
  assert.equal(await button.getAttribute('aria-label'), 'Notifications: 2');
  assert.deepEqual(asked.sort(), ['GET /-/me/follows', `POST /news/changes ${KEY}`, 'PUT /-/me/follows/news']);
  say(1234);
  await one.waitForFunction(() => document.getElementById('bell').count === 1234);
  assert.equal(await badge(), '1.2K');
  await button.click();
  await one.getByRole('button', { name: 'Mark all as read' }).click();
  await one.waitForFunction(() => document.getElementById('bell').count === 0);
  assert.equal(await badge(), '');
  assert.deepEqual(sent, ['{"type":"read"}']);
  assert.equal(await button.getAttribute('aria-label'), 'Notifications');
  await one.context().close();
});


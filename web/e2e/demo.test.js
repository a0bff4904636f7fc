// The demo page and <live-count> in a real Chromium against a real server.
//
//   CHROMIUM       the browser, if not /usr/bin/chromium
//   HEADCOUNT_BIN  the server, if it is not to be built here
//   SCREENSHOT     where to write a picture of the demo page
import assert from 'node:assert/strict';
import { existsSync } from 'node:fs';
import { createServer } from 'node:http';
import { after, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import { chromium } from 'playwright-core';

import { Server, freePort, program } from './server.js';

const LEAVE_GRACE = 2_000; // the server's default
const CHROMIUM = process.env.CHROMIUM || '/usr/bin/chromium';

let binary;
let server;
let browser;
let site; // a customer's site, on another origin
let showcase; // the window that the picture is taken of
let visitors; // those who come and go there
const windows = [];

before(
  async () => {
    assert.ok(
      existsSync(CHROMIUM),
      `There is no browser at ${CHROMIUM}: install it (Debian: apt-get install chromium) or name one in CHROMIUM.`,
    );
    binary = await program();
    const sitePort = await freePort();
    site = await startSite(sitePort);
    server = await Server.start(binary.path, [
      // localhost, since cookies know no ports: under 127.0.0.1 it would be the server's own site.
      '--allow-origins', `http://localhost:${sitePort}`,
      '--shutdown-timeout', '2s',
    ]);
    browser = await chromium.launch({
      executablePath: CHROMIUM,
      ignoreDefaultArgs: ['--disable-back-forward-cache'], // people have it
      args: [
        '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
        '--disable-background-networking', '--disable-component-update', '--disable-sync',
      ],
    });
    // Opened first, with people coming and going, so that its line has something to tell.
    showcase = await open('/', { viewport: { width: 1280, height: 800 } });
    visitors = comeAndGo('demo');
  },
  { timeout: 300_000 },
);

after(async () => {
  await visitors?.stop().catch(() => {}); // the test that awaits it says what is wrong
  await browser?.close();
  site?.close();
  try {
    await server?.stop();
  } finally {
    await binary?.remove();
  }
});

function startSite(port) {
  const server = createServer((request, response) => {
    if (request.url === '/favicon.ico') return response.writeHead(204).end();
    response.setHeader('Content-Type', 'text/html; charset=utf-8');
    response.end(`<!doctype html><html lang="de"><title>Shop</title>
      <link rel="canonical" href="/caf%C3%A9?no=query">
      <script type="module" src="${new URL(request.url, 'http://x').searchParams.get('from')}/-/headcount.js"></script>
      <p><live-count id="here">…</live-count> here, <live-count id="other" page="elsewhere" watch></live-count> there`);
  });
  return new Promise((ready) => server.listen(port, () => ready(Object.assign(server, { url: `http://localhost:${port}` }))));
}

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
async function open(address, options = {}, context) {
  context ??= await browser.newContext(options);
  const page = await context.newPage();
  page.complaints = [];
  page.on('console', (message) => {
    if (['error', 'warning'].includes(message.type())) page.complaints.push(message.text());
  });
  page.on('pageerror', (error) => page.complaints.push(String(error)));
  windows.push(page);
  await page.goto(new URL(address, server.url).href);
  return page;
}

const demo = (page) => `/?page=${page}`;
const shown = (page, id = 'count') => page.evaluate((id) => document.getElementById(id).count, id);

/** Waits until a window shows the count that is wanted. */
async function expectCount(page, want, within = 3_000, id = 'count') {
  const deadline = Date.now() + within;
  let got;
  while (Date.now() < deadline) {
    got = await shown(page, id);
    if (got === want) return;
    await sleep(25);
  }
  assert.fail(`the window shows ${got}, not ${want}, after ${within} ms`);
}

const expectState = (page, want) =>
  page.waitForFunction((want) => document.getElementById('state').textContent === want, want, { timeout: 15_000 });

/** Begins to write down every count a window shows. */
const record = (page) =>
  page.evaluate(() => {
    const element = document.getElementById('count');
    window.record = [element.count];
    element.addEventListener('count', ({ detail }) => window.record.push(detail.count));
  });

test('two people see each other, and one who closes is gone after the leave-grace', async () => {
  const one = await open(demo('pair'));
  await expectCount(one, 1);
  assert.match(await one.innerText('h1'), /^person on pair right now$/);
  const two = await open(demo('pair'));
  await Promise.all([expectCount(one, 2), expectCount(two, 2)]);
  assert.match(await one.innerText('h1'), /^people on pair right now$/);
  await expectState(one, 'live');
  assert.match(await one.title(), /^2 here/);
  await two.context().close();
  await expectCount(one, 1, LEAVE_GRACE + 2_000);
  await one.context().close();
});

test('two tabs of one browser are one person', async () => {
  const one = await open(demo('tabs'));
  await expectCount(one, 1);
  const tab = await open(demo('tabs'), {}, one.context());
  await expectCount(tab, 1);
  const other = await open(demo('tabs'));
  await expectCount(other, 2);
  await expectCount(one, 2);
  await tab.close();
  await sleep(LEAVE_GRACE + 500);
  assert.equal(await shown(other), 2, 'one tab is left');
  await one.context().close();
  await other.context().close();
});

test('a reload is not seen by others', async () => {
  const one = await open(demo('reload'));
  const other = await open(demo('reload'));
  await expectCount(other, 2);
  await record(other);
  for (let i = 0; i < 3; i++) {
    await one.reload();
    await expectCount(one, 2);
  }
  await sleep(LEAVE_GRACE + 500);
  assert.deepEqual(await other.evaluate(() => window.record), [2]);
  await one.context().close();
  await other.context().close();
});

test('a page that the browser kept for "back" is counted again', async () => {
  const other = await open(demo('cached'));
  const one = await open(demo('cached'));
  await expectCount(other, 2);
  await one.evaluate(() => addEventListener('pageshow', ({ persisted }) => (window.restored = persisted)));
  await one.goto(new URL(demo('cached-next'), server.url).href);
  await expectCount(other, 1, LEAVE_GRACE + 2_000);
  // Not goBack: that waits for a load, and a page that was kept does not load.
  await one.evaluate(() => void setTimeout(() => history.back()));
  await expectCount(other, 2);
  assert.equal(await one.evaluate(() => window.restored), true);
  await expectState(one, 'live');
  await one.context().close();
  await other.context().close();
});

test('the pages of the list can be walked, there and back', async () => {
  const one = await open('/?page=walk');
  await expectCount(one, 1);
  await one.click('#pages a[data-page="docs/getting started"]');
  assert.equal(new URL(one.url()).search, '?page=docs%2Fgetting%20started');
  await expectCount(one, 1);
  assert.equal(await server.count('docs/getting started'), 1);
  assert.equal(await server.count('walk'), 0, 'left at once');
  await one.goBack();
  await expectCount(one, 1);
  assert.equal(await server.count('walk'), 1);
  assert.equal(await one.innerText('#page'), 'walk');
  await one.context().close();
});

test('the client by hand: join, watch, leave, close', async () => {
  const one = await open(demo('outside'));
  const watcher = await open(demo('hand'));
  await expectCount(watcher, 1);
  await one.evaluate(async () => {
    const { Headcount } = await import('/-/headcount.js');
    window.seen = [];
    window.mine = new Headcount();
    window.mine.watch('hand', ({ count }) => window.seen.push(count));
    window.mine.join('hand');
  });
  await expectCount(watcher, 2);
  const left = Date.now();
  await one.evaluate(() => window.mine.leave('hand'));
  await expectCount(watcher, 1, LEAVE_GRACE - 500);
  assert.ok(Date.now() - left < LEAVE_GRACE, 'a leave is no mere close');
  await one.waitForFunction(() => window.seen.at(-1) === 1, undefined, { timeout: 3_000 });
  await one.evaluate(() => {
    window.mine.join('hand');
  });
  await expectCount(watcher, 2);
  await one.evaluate(() => window.mine.close());
  await expectCount(watcher, 1, LEAVE_GRACE - 500);
  await one.context().close();
  await watcher.context().close();
});

test('<live-count> on a site of another origin', async () => {
  const address = `${site.url}/?from=${encodeURIComponent(server.url)}`;
  const one = await open(address);
  await expectCount(one, 1, 3_000, 'here');
  assert.equal(await server.count('/café'), 1, 'the canonical path, readable');
  await expectCount(one, 0, 3_000, 'other');
  assert.equal(await server.count('elsewhere'), 0, 'who watches is not counted');

  const two = await open(address);
  await expectCount(one, 2, 3_000, 'here');
  assert.deepEqual(
    await one.evaluate(() => {
      const number = document.getElementById('here').shadowRoot.querySelector('[part~=count]');
      return [number.textContent, number.part.contains('offline'), getComputedStyle(number).opacity];
    }),
    ['2', false, '1'],
  );
  // No cookie crosses over: the id that the page keeps makes the reload the same person.
  await one.evaluate(() => {
    window.record = [];
    document.getElementById('here').addEventListener('count', ({ detail }) => window.record.push(detail.count));
  });
  await two.reload();
  await expectCount(two, 2, 3_000, 'here');
  await sleep(LEAVE_GRACE + 500);
  assert.deepEqual(await one.evaluate(() => window.record), []);

  await one.evaluate(() => document.getElementById('here').setAttribute('watch', ''));
  await expectCount(two, 1, 3_000, 'here');
  await one.evaluate(() => document.getElementById('here').setAttribute('page', 'elsewhere'));
  await one.evaluate(() => document.getElementById('here').removeAttribute('watch'));
  await expectCount(one, 1, 3_000, 'other');
  await one.evaluate(() => document.getElementById('here').remove());
  await expectCount(one, 0, 3_000, 'other');
  await one.context().close();
  await two.context().close();
});

test('on a phone nothing sticks out', async () => {
  const phone = await open(demo('a'.repeat(128)), { viewport: { width: 320, height: 640 }, isMobile: true });
  await expectCount(phone, 1);
  assert.equal(await phone.evaluate(() => document.documentElement.scrollWidth), 320);
  await phone.context().close();
});

test('a busy site, and a picture of it', async () => {
  await visitors.stop();
  const crowds = { pricing: 4, 'docs/getting started': 7, 'blog/hello-world': 2, café: 3 };
  for (const [page, viewers] of Object.entries(crowds)) {
    for (let i = 0; i < viewers; i++) {
      await server.hold(page);
      await sleep(40);
    }
  }
  await sleep(LEAVE_GRACE); // the windows of other tests are gone
  await expectCount(showcase, await server.count('demo'));
  for (const [page, viewers] of Object.entries(crowds)) {
    const number = await showcase.$(`#pages a[data-page="${page}"] live-count`);
    assert.equal(await number.evaluate((element) => element.count), viewers, page);
  }
  await expectCount(showcase, await server.count('*'), 3_000, 'site');
  await showcase.screenshot({ path: process.env.SCREENSHOT || undefined });
});

test('a crowd comes, each of them someone', async () => {
  const one = await open(demo('crowd'));
  await expectCount(one, 1);
  await one.click('#crowd button[value="1"]');
  await expectCount(one, 2);
  await one.click('#crowd button[value="10"]');
  await expectCount(one, 12);
  assert.match(await one.innerText('#crowd-state'), /^11 came/);
  assert.notEqual(await one.getAttribute('#chart .line', 'd'), '');
  await one.context().close();
});

test('no window had anything to complain about', () => {
  for (const page of windows) assert.deepEqual(page.complaints, [], page.url());
});

// Last, for a server that goes away makes browsers complain.
test('a server that starts again is found again', async () => {
  const one = await open(demo('restart'));
  const two = await open(demo('restart'));
  await expectCount(one, 2);
  await server.stop();
  await expectState(one, 'reconnecting');
  assert.equal(
    await one.evaluate(() => document.getElementById('count').shadowRoot.querySelector('[part~=count]').part.contains('offline')),
    true,
  );
  await server.run();
  await Promise.all([one, two].map((page) => expectState(page, 'live')));
  await Promise.all([one, two].map((page) => expectCount(page, 2)));
  const three = await open(demo('restart'));
  await Promise.all([one, two, three].map((page) => expectCount(page, 3)));
});

// One pass through a real Chromium against a real server: counts, likes and unread
// notifications are live, with and without WebSockets.
import assert from 'node:assert/strict';
import { get } from 'node:http';
import { after, before, test } from 'node:test';

import { TIMEOUT, expectCount, expectState, launch, open as openIn, startOfficeProxy } from './browser.js';
import { Server, program } from './server.js';

const KEY = 'a key for tests alone';

let binary;
let server;
let browser;
let office; // a proxy without WebSockets

before(
  async () => {
    binary = await program();
    server = await Server.start(binary.path, ['--shutdown-timeout', '2s', '--api-key', KEY]);
    office = await startOfficeProxy(server.port);
    browser = await launch();
  },
  { timeout: 600_000 },
);

after(async () => {
  await browser?.close();
  office?.close();
  try {
    await server?.stop();
  } finally {
    await binary?.remove();
  }
}, { timeout: TIMEOUT });

/** A new person's window, or with a context another tab of theirs. */
const open = async (page, { from = server.url, context = undefined, prepare = undefined } = {}) =>
  openIn(context ?? (await browser.newContext()), `${from}/?page=${page}`, prepare);

/** How many bytes a browser gets of a file: over TLS, and from this machine, it takes brotli. */
const size = (name) =>
  new Promise((resolve, reject) => {
    const request = get(
      `${server.url}/-/${name}`,
      { headers: { 'Accept-Encoding': 'gzip, deflate, br, zstd' } },
      async (answer) => {
        let bytes = 0;
        for await (const part of answer) bytes += part.length;
        resolve(bytes);
      },
    );
    request.on('error', reject);
  });

test('the client is small, as it is served', async () => {
  for (const [name, most] of Object.entries({
    'headcount.js': 6_000,
    'live.js': 3_000,
    'bell.js': 1_000,
    'list.js': 2_500,
    'more.js': 3_000,
    'rescue.js': 3_500,
    'live-top.js': 2_000,
  })) {
    const bytes = await size(name);
    assert.ok(bytes < most, `${name} has ${bytes} bytes; at most ${most}`);
  }
});

test('a second visit asks for no part again', async () => {
  const page = await open('again');
  await expectCount(page, 1);
  const loaded = () =>
    page.evaluate(() =>
      performance
        .getEntriesByType('resource')
        .filter(({ name }) => /\/-\/(live|more|bell)\.js\?/.test(name))
        .map(({ transferSize }) => transferSize),
    );
  assert.ok((await loaded()).length >= 3);
  await page.reload();
  await expectCount(page, 1);
  assert.deepEqual([...new Set(await loaded())], [0]);
  await page.context().close();
});

test('two people see each other, and one who closes is gone after the leave-grace', async () => {
  const one = await open('pair');
  await expectCount(one, 1);
  assert.match(await one.innerText('h1'), /^person on pair right now$/);
  const two = await open('pair');
  await Promise.all([expectCount(one, 2), expectCount(two, 2)]);
  assert.match(await one.innerText('h1'), /^people on pair right now$/);
  await expectState(one, 'live');
  assert.match(await one.title(), /^2 here/);
  await one.click('#likes');
  await Promise.all([one, two].map((page) => expectCount(page, 1, 'likes')));
  await two.context().close();
  await expectCount(one, 1);
  assert.deepEqual(one.complaints, []);
  await one.context().close();
});

test('where WebSockets are blocked there are event streams and PUTs', async () => {
  const watcher = await open('office');
  const page = await open('office', { from: office.url });
  await Promise.all([page, watcher].map((page) => expectCount(page, 2)));
  await expectState(page, 'live');
  await page.click('#likes');
  await Promise.all([page, watcher].map((page) => expectCount(page, 1, 'likes')));
  await page.click('#pages a[data-page="pricing"]');
  await expectCount(watcher, 1);
  assert.match(page.complaints.join(), /WebSocket/, 'the browser mentions what was blocked');
  const visitor = await open('office', { from: office.url });
  await expectCount(watcher, 2);
  // All pages of the list have a count, though a browser has few connections for streams.
  await visitor.waitForFunction(() =>
    [...document.querySelectorAll('#pages live-count')].every((count) => count.count !== undefined),
  );
  await visitor.context().close();
  await expectCount(watcher, 1);
  for (const window of [page, watcher]) await window.context().close();
});

test('the bell of a real server: follow, modify, read, in all tabs', async () => {
  const one = await open('told', {
    prepare: (page) => page.addInitScript((key) => sessionStorage.setItem('headcount_api_key', key), KEY),
  });
  await expectCount(one, 1);
  const tab = await open('elsewhere', { context: one.context() });
  await expectCount(tab, 1);
  const unread = (page, want) => page.waitForFunction((want) => document.getElementById('bell').count === want, want);
  await one.click('#follow');
  await one.waitForFunction(() => document.getElementById('follow').getAttribute('aria-pressed') === 'true');
  await one.click('#modify');
  await Promise.all([one, tab].map((page) => unread(page, 1)));
  await one.click('#modify');
  await Promise.all([one, tab].map((page) => unread(page, 2)));
  const later = await open('told', { context: one.context() });
  await unread(later, 2);
  await later.hover('#follow');
  await later.waitForFunction(() => document.getElementById('follow').getAttribute('aria-pressed') === 'true');
  await tab.getByRole('button', { name: 'Notifications: 2' }).click();
  await tab.getByRole('button', { name: 'Mark all as read' }).click();
  await Promise.all([one, tab, later].map((page) => unread(page, 0)));
  await one.click('#follow');
  await one.waitForFunction(() => document.getElementById('follow').getAttribute('aria-pressed') === 'false');
  const [changed] = await Promise.all([one.waitForResponse(/\/changes$/), one.click('#modify')]);
  const left = await one.evaluate(async () => (await fetch('/-/me/unread')).json());
  assert.deepEqual([changed.status(), left.count], [204, 0], 'not followed any more');
  for (const other of [later, tab, one]) {
    assert.deepEqual(other.complaints, []);
    await other.close(); // the one with the connection last
  }
  await one.context().close();
});

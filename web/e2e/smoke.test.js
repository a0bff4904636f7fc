// One pass through a real Chromium against a real server: counts, likes and unread
// notifications are live, with and without WebSockets.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';

import { expectCount, expectState, launch, open as openIn, startOfficeProxy, streaming, within } from './browser.js';
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
});

/** A new person's window, or with a context another tab of theirs. */
const open = async (page, { from = server.url, context = undefined, prepare = undefined } = {}) =>
  openIn(context ?? (await browser.newContext()), `${from}/?page=${page}`, prepare);

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
  let held;
  const visitor = await open('office', { from: office.url, prepare: (page) => void (held = streaming(page)) });
  await expectCount(watcher, 2);
  await held;
  await visitor.context().close();
  await within(4_000, 'a closed tab is gone 2 s after the leave-grace of 2 s, and not after the 14 s of a hold by PUT', () => expectCount(watcher, 1));
  for (const window of [page, watcher]) await window.context().close();
});

test('the bell of a real server: follow, modify, read, in all tabs', async () => {
  const one = await open('told', { prepare: (page) => page.addInitScript((key) => sessionStorage.setItem('headcount_api_key', key), KEY) });
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

// The client in a real Chromium under bad conditions: tabs that share a connection
// and die, networks that fail, proxies, other origins.
import assert from 'node:assert/strict';
import { createHmac } from 'node:crypto';
import { after, afterEach, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import {
  GRACE,
  LEAVE_GRACE,
  TIMEOUT,
  eventually,
  expectCount,
  expectState,
  launch,
  open,
  record,
  recorded,
  shown,
  startCable,
  startOfficeProxy,
  startSite,
  streaming,
} from './browser.js';
import { Server, program } from './server.js';

const KEY = 'a key that is long enough';

let binary;
let server;
let browser;
let office; // a proxy without WebSockets
let site; // of another origin, allowed

const embed = (url) => `<!doctype html><html lang="en"><title>Shop</title>
  <script type="module" src="${url.searchParams.get('from')}/-/headcount.js"></script>
  <p><live-count id="count" page="${url.pathname}"></live-count> here
  <p><live-counter id="votes" key="votes:${url.pathname}"></live-counter> votes
  <like-button id="likes" key="likes:${url.pathname}"></like-button>
  ${url.searchParams.has('follow') ? `<follow-button id="follow" page="${url.pathname}"></follow-button><unread-bell id="bell"></unread-bell>` : ''}`;

before(
  async () => {
    binary = await program();
    site = await startSite(embed);
    server = await Server.start(binary.path, [
      '--allow-origins',
      site.url,
      '--api-key',
      KEY,
      '--private',
      'team/*',
      ...GRACE,
      '--shutdown-timeout',
      '2s',
    ]);
    office = await startOfficeProxy(server.port);
    browser = await launch();
  },
  { timeout: 600_000 },
);

afterEach(() => Promise.all(browser.contexts().map((context) => context.close()))); // those of a test that failed

after(async () => {
  await browser?.close();
  for (const thing of [site, office]) thing?.close();
  try {
    await server?.stop();
  } finally {
    await binary?.remove();
  }
}, { timeout: TIMEOUT });

const at = (page, base = server.url) => `${base}/?page=${page}`;
const connections = (want) => eventually(want, 'connections of the server', () => server.connections());

/** Makes a tab look asleep to the others: nothing comes in or goes out. */
function dozing() {
  const { BroadcastChannel } = window;
  window.BroadcastChannel = class extends BroadcastChannel {
    set onmessage(listener) {
      super.onmessage = (event) => window.asleep || listener(event);
    }
    postMessage(message) {
      if (!window.asleep) super.postMessage(message);
    }
  };
}

/** Three tabs of one person on a page, and somebody who records what others see of it. */
async function tabs(page) {
  await connections(0);
  const watcher = await open(await browser.newContext(), at(page));
  await expectCount(watcher, 1);
  const context = await browser.newContext();
  const mine = [];
  for (let i = 0; i < 3; i++) {
    mine.push(await open(context, at(page), (page) => page.addInitScript(dozing)));
    await expectCount(mine[i], 2);
  }
  await connections(2);
  await expectCount(watcher, 2);
  await record(watcher);
  return { context, watcher, mine, done: () => Promise.all([context.close(), watcher.context().close()]) };
}

test('the tabs of a site share one connection, whose tab may close, and nobody sees it', async () => {
  const { watcher, mine, done } = await tabs('shared');
  await mine[0].close(); // it has the connection
  await expectCount(mine[1], 2);
  await sleep(LEAVE_GRACE + 1_000);
  await connections(2);
  await Promise.all([mine[1], mine[2]].map((page) => expectState(page, 'live')));

  await mine[1].reload();
  await mine[2].reload();
  await Promise.all([mine[1], mine[2]].map((page) => expectCount(page, 2)));
  await sleep(LEAVE_GRACE + 1_000);
  assert.deepEqual(await recorded(watcher), [2], 'never down and up');

  const leave = await server.hold('shared');
  await Promise.all([mine[1], mine[2], watcher].map((page) => expectCount(page, 3)));
  await leave();
  await Promise.all([mine[1], mine[2]].map((page) => expectCount(page, 2)));
  await mine[1].close();
  await mine[2].close();
  await expectCount(watcher, 1);
  await done();
});

test('a tab that has the connection and is asleep is replaced', async () => {
  const { watcher, mine, done } = await tabs('asleep');
  await mine[0].evaluate(() => (window.asleep = true));
  const since = performance.now();
  const visitor = await open(await browser.newContext(), at('asleep'));
  await expectCount(watcher, 3);
  await sleep(500);
  const count = await shown(mine[1]);
  // later it may have taken over by itself
  if (performance.now() - since < 3_000) assert.equal(count, 2, 'nobody tells it');
  await mine[1].evaluate(() => dispatchEvent(new Event('visibilitychange'))); // somebody looks
  await Promise.all([mine[1], mine[2]].map((page) => expectCount(page, 3)));
  await mine[0].evaluate(() => {
    window.asleep = false;
    dispatchEvent(new Event('visibilitychange'));
  });
  await expectCount(mine[0], 3);
  await connections(3); // of watcher, visitor and all of ours together
  await visitor.context().close();
  await Promise.all(mine.map((page) => expectCount(page, 2)));
  await mine[1].close();
  await Promise.all([mine[0], mine[2]].map((page) => expectState(page, 'live')));
  await sleep(LEAVE_GRACE + 1_000);
  assert.deepEqual(await recorded(watcher), [2, 3, 2]);
  await done();
});

test('connections that a network has forgotten without a word hold nothing up', async () => {
  const cable = await startCable(server.port);
  const page = await open(await browser.newContext(), `${site.url}/hushed?from=${cable.url}`);
  await expectCount(page, 1);
  const file = page.waitForRequest(/rescue\.js/);
  cable.hush();
  await page.evaluate(() => dispatchEvent(new Event('online'))); // the client asks for a sign of life
  await file; // over one of those connections
  const other = await open(await browser.newContext(), `${site.url}/hushed?from=${server.url}`);
  cable.plug();
  await expectCount(page, 2);
  for (const window of [page, other]) await window.context().close();
  cable.close();
});

/** What a like button shows: the number, and whether it is pressed. */
const liked = (page) => page.evaluate(() => {
  const { shadowRoot } = document.getElementById('likes');
  return `${shadowRoot?.querySelector('[part~=count]').textContent} ${shadowRoot?.querySelector('button')?.getAttribute('aria-pressed')}`;
});
const expectLiked = (page, want) => eventually(want, 'the button shows', () => liked(page));

test('likes are live for all, and a person on another origin is one person', async () => {
  const address = `${site.url}/likes?from=${encodeURIComponent(server.url)}`;
  const [mine, others] = [await browser.newContext(), await browser.newContext()];
  const [one, tab, two] = [await open(mine, address), await open(mine, address), await open(others, address)];
  await Promise.all([one, tab, two].map((page) => expectLiked(page, '0 false')));
  await connections(2);
  await one.click('#likes');
  await Promise.all([one, tab].map((page) => expectLiked(page, '1 true')));
  await expectLiked(two, '1 false');

  // By keyboard, with the name and state that a screen reader says.
  const button = two.getByRole('button', { name: 'Like: 1', pressed: false });
  await button.focus();
  await two.keyboard.press('Space');
  await two.getByRole('button', { name: 'Like: 2', pressed: true }).waitFor();
  await Promise.all([one, tab].map((page) => expectLiked(page, '2 true')));
  assert.notEqual(
    await one.evaluate(() => document.querySelector('body > [role=status]').textContent),
    '',
    'it is announced, or waits for what is',
  );
  await one.reload();
  await expectLiked(one, '2 true');
  await tab.click('#likes');
  await Promise.all([one, tab].map((page) => expectLiked(page, '1 false')));
  await expectLiked(two, '1 true');

  // The same from a script. A counter that is open to everyone is incremented once for each visit.
  const value = await two.evaluate(async (from) => {
    const { Headcount } = await import(`${from}/-/headcount.js`);
    await Headcount.shared.counter('likes:/likes').remove();
    for await (const { value } of Headcount.shared.counter('likes:/likes').watch()) return value;
  }, server.url);
  assert.equal(value, 0);
  await expectLiked(two, '0 false');
  await two.evaluate(() => {
    for (let i = 0; i < 2; i++) {
      const votes = document.createElement('live-counter');
      votes.setAttribute('key', 'votes:/likes');
      votes.setAttribute('increment', '');
      document.body.append(votes);
    }
  });
  await Promise.all([one, two].map((page) => expectCount(page, 1, 'votes')));
  assert.deepEqual([...one.complaints, ...two.complaints], []);
  await mine.close();
  await others.close();
});

test('a click shows at once, and a refusal puts it right again', async () => {
  const page = await browser
    .newContext()
    .then((context) => open(context, `${site.url}/refused?from=${encodeURIComponent(server.url)}`));
  await expectLiked(page, '0 false');
  await page.evaluate(() => {
    window.refusals = [];
    document.getElementById('likes').addEventListener('refused', ({ detail }) => window.refusals.push(detail.status));
  });
  const said = () => page.evaluate(() => document.querySelector('body > [role=status]').textContent);
  let status;
  let answer;
  await page.route('**/members/me', async (route) => {
    await new Promise((go) => (answer = go));
    if (!status) return route.abort();
    return route.fulfill({
      status,
      json: { detail: 'no' },
      headers: { 'Access-Control-Allow-Origin': site.url, 'Access-Control-Allow-Credentials': 'true' },
    });
  });
  for (status of [403, 409, 429, undefined]) {
    answer = undefined;
    await page.click('#likes');
    assert.equal(await liked(page), '1 true', 'before there is an answer');
    await eventually(true, 'it is asked for', () => answer !== undefined);
    answer();
    await expectLiked(page, '0 false');
    await eventually('That could not be saved.', 'the page says', said);
  }
  assert.deepEqual(await page.evaluate(() => window.refusals), [403, 409, 429, undefined]);
  await page.unroute('**/members/me');
  // the last click holds, and one request is under way at a time
  for (let i = 0; i < 3; i++) await page.click('#likes');
  await eventually('1 true', 'at last', () => liked(page));
  await eventually(
    1,
    'the server has',
    async () => (await (await fetch(`${server.url}/api/v1/counters/likes%3A%2Frefused`)).json()).value,
  );
  await page.context().close();
});

test('likes, follows and public counters also work where WebSockets are blocked, for one person', async () => {
  let held;
  const other = await browser
    .newContext()
    .then((context) => open(context, `${site.url}/slow?from=${encodeURIComponent(server.url)}`));
  await expectLiked(other, '0 false');
  const page = await browser
    .newContext()
    .then((context) =>
      open(context, `${site.url}/slow?follow&from=${encodeURIComponent(office.url)}`, (page) => void (held = streaming(page))),
    );
  await expectLiked(page, '0 false');
  // A counter that is not public takes nothing else with it, and the console says why.
  await page.evaluate(() =>
    document.body.insertAdjacentHTML('beforeend', '<live-counter key="secret"></live-counter>'),
  );
  await eventually(true, 'told', async () => page.complaints.some((text) => /secret: .*not public/.test(text)));
  await page.click('#likes');
  await Promise.all([expectLiked(page, '1 true'), expectLiked(other, '1 false')]);
  await other.click('#likes');
  await Promise.all([expectLiked(page, '2 true'), expectLiked(other, '2 true')]);
  await other.evaluate(
    async (from) => (await import(`${from}/-/headcount.js`)).Headcount.shared.counter('votes:/slow').increment(),
    server.url,
  );
  await expectCount(page, 1, 'votes');
  await page.reload();
  await expectLiked(page, '2 true');
  await page.click('#likes');
  await Promise.all([expectLiked(page, '1 false'), expectLiked(other, '1 true')]);
  await held; // by now a stream has the user's place of the first PUT
  assert.equal(await server.count('/slow'), 2);

  await expectPressed(page, 'false');
  await page.click('#follow');
  await eventually('/slow', 'is followed', async () => (await follows(page, office.url)).join());
  await modify('/slow');
  await expectCount(page, 1, 'bell');
  for (const window of [page, other]) await window.context().close();
});

test('refused pages take no other page with them, with WebSockets or without', async () => {
  for (const from of [server.url, office.url]) {
    const page = await browser
      .newContext()
      .then((context) => open(context, `${site.url}/public?from=${encodeURIComponent(from)}`));
    await page.evaluate(() =>
      document.body.insertAdjacentHTML(
        'beforeend',
        `<live-count id="team" page="team/x" watch>-</live-count><live-count id="prices" page="prices" watch>-</live-count>
        <live-count page="bad\u0001" watch></live-count><live-count page="bad\u0002"></live-count>`,
      ),
    );
    for (const words of [/page is private/, /"bad\\u0001" is not counted: .*U\+0001/, /"bad\\u0002" is not counted: .*U\+0002/])
      await eventually(true, 'told', async () => page.complaints.some((text) => words.test(text)));
    await expectCount(page, 0, 'prices');
    await expectLiked(page, '0 false');
    assert.equal(await page.evaluate(() => document.getElementById('team').count), undefined);
    await page.context().close();
  }
});

/** Says that a page was modified. */
async function modify(page, at = server) {
  const answer = await fetch(`${at.url}/${encodeURIComponent(page)}/changes`, {
    method: 'POST',
    headers: { 'X-API-Key': KEY },
  });
  assert.equal(answer.status, 204);
}

const pressed = (page) =>
  page.evaluate(() =>
    document.getElementById('follow').shadowRoot?.querySelector('button')?.getAttribute('aria-pressed'),
  );
const expectPressed = (page, want) => eventually(want, 'the button is pressed', () => pressed(page));

/** The pages that the visitor of a window follows. */
const follows = (page, from = server.url) =>
  page.evaluate(async (from) => (await import(`${from}/-/headcount.js`)).Headcount.shared.follows(), from);

test('a visitor of another site follows a page, and the bell is the same visitor\'s', async () => {
  const address = `${site.url}/followed?follow&from=${encodeURIComponent(server.url)}`;
  const [mine, others] = [await browser.newContext(), await browser.newContext()];
  const [one, two] = [await open(mine, address), await open(others, address)]; // nobody was here before
  await Promise.all([one, two].map((page) => expectPressed(page, 'false')));
  await one.getByRole('button', { name: 'Follow', pressed: false }).click();
  await one.getByRole('button', { name: 'Follow', pressed: true }).waitFor();
  await eventually('/followed', 'is followed', async () => (await follows(one)).join());
  await modify('/followed');
  await expectCount(one, 1, 'bell');
  assert.deepEqual(await follows(two), [], 'the other one follows nothing');
  assert.deepEqual(await mine.cookies(), [], 'the browser keeps no cookie');
  await one.reload();
  const tab = await open(mine, address);
  await Promise.all([one, tab].map((page) => expectPressed(page, 'true')));
  await Promise.all([one, tab].map((page) => expectCount(page, 1, 'bell')));
  await one.click('#follow');
  await Promise.all([one, tab].map((page) => expectCount(page, 0, 'bell')));
  assert.deepEqual(await follows(tab), []);
  await expectCount(two, 0, 'bell');
  for (const context of [mine, others]) await context.close();
});

test('a script follows from the first visit on, here, elsewhere, and with a token', async () => {
  const secret = 'a secret of thirty-two bytes, or more';
  const base64 = (value) => Buffer.from(value).toString('base64url');
  const unsigned = `${base64('{"alg":"HS256"}')}.${base64('{"sub":"ann"}')}`;
  const token = `${unsigned}.${createHmac('sha256', secret).update(unsigned).digest('base64url')}`;
  const guarded = await Server.start(binary.path, [
    '--allow-origins',
    site.url,
    '--api-key',
    KEY,
    '--jwt-secret',
    secret,
    '--shutdown-timeout',
    '2s',
  ]);
  const here = await open(await browser.newContext(), at('scripted'));
  const elsewhere = await open(
    await browser.newContext(),
    `${site.url}/scripted?from=${encodeURIComponent(server.url)}`,
  );
  try {
    for (const [what, window, at, options] of [
      ['here', here, server, {}],
      ['elsewhere', elsewhere, server, {}],
      ['elsewhere, without storage', elsewhere, server, { storage: 'none' }],
      ['elsewhere, with a token', elsewhere, guarded, { token }],
    ]) {
      const page = `scripted ${what}`;
      const all = await window.evaluate(async ({ from, page, options }) => {
        const { Headcount } = await import(`${from}/-/headcount.js`);
        const headcount = new Headcount({ server: from, ...options });
        await Promise.all([headcount.follow(page), headcount.follow('another')]);
        await headcount.unfollow('another');
        window.unread = 0;
        headcount.unread((count) => (window.unread = count));
        return headcount.follows();
      }, { from: at.url, page, options });
      assert.deepEqual(all, [page]);
      await modify(page, at);
      await window.waitForFunction(() => window.unread === 1);
    }
  } finally {
    for (const window of [here, elsewhere]) await window.context().close();
    await guarded.stop();
  }
});

/** Has a page think that it is hidden, or seen, when a test says so. */
const hideable = (page) =>
  page.addInitScript(() => {
    window.away = false;
    Object.defineProperty(document, 'hidden', { get: () => window.away });
    window.hide = (yes) => {
      window.away = yes;
      document.dispatchEvent(new Event('visibilitychange', { bubbles: true }));
    };
  });

test('a user who hides a tab for a minute is not counted, if the site says so', async () => {
  const watcher = await open(await browser.newContext(), at('hidden'));
  await expectCount(watcher, 1);
  const page = await browser.newContext().then((context) => open(context, at('hidden'), async (page) => {
    await page.clock.install();
    await hideable(page);
  }));
  await expectCount(watcher, 2);
  await page.evaluate(() => document.getElementById('count').setAttribute('count-hidden', 'false'));
  await record(watcher);
  // The page's clock goes on by itself, too: the rest of the minute is for a busy machine.
  await page.evaluate(() => hide(true));
  await page.clock.fastForward(5_000);
  await page.clock.fastForward(35_000);
  await page.evaluate(() => hide(false));
  await page.evaluate(() => hide(true));
  await page.clock.fastForward(5_000);
  await page.clock.fastForward(35_000);
  await sleep(500);
  assert.equal(await shown(watcher), 2, 'not a minute in one piece');
  await page.clock.fastForward(20_000);
  await expectCount(watcher, 1);
  await page.evaluate(() => hide(false));
  await expectCount(watcher, 2);
  assert.deepEqual(await recorded(watcher), [2, 1, 2]);
  for (const window of [page, watcher]) await window.context().close();
});

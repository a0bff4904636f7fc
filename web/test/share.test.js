// Several tabs share one connection. Locks, channels and WebSockets are made by these
// tests, and each Headcount stands for a tab. The tests in e2e use a real browser.
import assert from 'node:assert/strict';
import { afterEach, beforeEach, mock, test } from 'node:test';

import { Headcount } from '../headcount.js';
import { FakeWebSocket, settle, signed, sockets, tick } from './fake.js';

let tabs;
let held; // lock -> who has it
let queues; // lock -> who waits
let channels;

/** A WebSocket whose server answers heartbeats. */
class AnsweringWebSocket extends FakeWebSocket {
  send(text) {
    super.send(text);
    if (this.sent.at(-1).type === 'heartbeat') queueMicrotask(() => this.say({ type: 'heartbeat' }));
  }
  welcome() {
    super.welcome({ id: undefined });
  }
  take() {
    return super.take().filter(({ type }) => type !== 'heartbeat');
  }
}

class FakeChannel {
  constructor(name) {
    this.name = name;
    channels.push(this);
  }
  postMessage(message) {
    if (this.asleep) return;
    const data = structuredClone(message);
    for (const other of channels)
      if (other !== this && other.name === this.name)
        queueMicrotask(() => other.closed || other.asleep || other.onmessage?.({ data }));
  }
  close() {
    this.closed = true;
    channels = channels.filter((channel) => channel !== this);
  }
}

const locks = {
  request(name, { signal, steal }, callback) {
    return new Promise((resolve, reject) => {
      const one = { callback, resolve, reject };
      const queue = queues.get(name) ?? [];
      queues.set(name, queue);
      if (steal) {
        held.get(name)?.reject(new DOMException('stolen', 'AbortError'));
        held.delete(name);
        queue.unshift(one);
      } else queue.push(one);
      signal?.addEventListener('abort', () => {
        if (!queue.includes(one)) return;
        queue.splice(queue.indexOf(one), 1);
        reject(new DOMException('aborted', 'AbortError'));
      });
      locks.grant(name);
    });
  },
  grant(name) {
    if (held.has(name) || !queues.get(name)?.length) return;
    const one = queues.get(name).shift();
    held.set(name, one);
    queueMicrotask(async () => {
      await one.callback();
      if (held.get(name) === one) {
        held.delete(name);
        locks.grant(name);
      }
      one.resolve();
    });
  },
};

/** A tab that joins pages. Its window's events are its own. */
async function tab(pages = ['p'], options = {}) {
  const page = new EventTarget();
  globalThis.addEventListener = page.addEventListener.bind(page);
  const headcount = new Headcount({ server: 'https://share.example', ...options });
  headcount.page = page;
  headcount.counts = [];
  headcount.states = [];
  headcount.addEventListener('state', ({ detail }) => headcount.states.push(detail));
  headcount.addEventListener('count', ({ detail }) => headcount.counts.push(detail.count));
  for (const name of [pages].flat()) headcount.join(name);
  tabs.push(headcount);
  await settle();
  return headcount;
}

/** As if its page were left, in whatever way. */
const go = (headcount) => headcount.page.dispatchEvent(new Event('pagehide'));

const count = (page, number, version) => ({ type: 'count', page, count: number, updated_at: null, version });

beforeEach(() => {
  sockets.length = 0;
  tabs = [];
  channels = [];
  held = new Map();
  queues = new Map();
  mock.timers.enable({ apis: ['setTimeout', 'setInterval'] });
  Object.defineProperty(globalThis, 'navigator', {
    value: { locks: { ...locks } },
    configurable: true,
    writable: true,
  });
  globalThis.BroadcastChannel = FakeChannel;
  globalThis.WebSocket = AnsweringWebSocket;
  globalThis.document = { hidden: false };
  globalThis.location = new URL('https://site.example/path');
  globalThis.fetch = () => Promise.reject(new TypeError('no network'));
  delete globalThis.localStorage;
});

afterEach(async () => {
  tabs.forEach((headcount) => headcount.close());
  await settle();
  mock.timers.reset();
});

test('two tabs have one connection, and each hears what it asked for', async () => {
  const first = await tab('p');
  sockets[0].welcome();
  assert.deepEqual(sockets[0].take(), [{ type: 'join', page: 'p' }]);
  const second = await tab(['p', 'q']);
  assert.equal(sockets.length, 1);
  // p is requested again, for the tab that comes later.
  assert.deepEqual(sockets[0].take(), [{ type: 'subscribe', pages: ['p'] }, { type: 'join', page: 'q' }]);
  assert.equal(second.state, 'open');
  sockets[0].say(count('p', 1, '1-1'));
  sockets[0].say(count('q', 5, '1-1'));
  sockets[0].say(count('p', 1, '1-1'));
  await settle();
  assert.deepEqual([first.counts, second.counts], [[1], [1, 5]]);
});

test('a connection brings counts as long as one of its tabs can be seen', async () => {
  const [first, second] = [await tab('p'), await tab('p')];
  sockets[0].welcome();
  await settle();
  const hide = async (headcount, yes) => {
    document.hidden = yes;
    headcount.page.dispatchEvent(new Event('visibilitychange'));
    document.hidden = true; // all tabs have this document, and a message has one that can be seen find that out
    await settle();
    sockets[0].say({ type: 'heartbeat' });
    await tick(5_000);
  };
  const paces = () => sockets[0].take().filter(({ type }) => type === 'pause' || type === 'resume');
  await hide(second, true);
  assert.deepEqual(paces(), []);
  await hide(first, true);
  assert.deepEqual(paces(), [{ type: 'pause' }]);
  await hide(second, false);
  assert.deepEqual(paces(), [{ type: 'resume' }]);
  go(second);
  await settle();
  await tick(10_000);
  assert.deepEqual(paces(), [{ type: 'pause' }], 'the one that was seen is gone');
  document.hidden = false;
  const third = await tab('q');
  assert.deepEqual(paces(), [{ type: 'resume' }]);
  third.close();
});

test('what others know is asked for when the connection brings counts again', async () => {
  const first = await tab('p');
  sockets[0].welcome();
  document.hidden = true;
  first.page.dispatchEvent(new Event('visibilitychange'));
  await tick(5_000);
  assert.deepEqual(sockets[0].take().at(-1), { type: 'pause' });
  const second = await tab(['p', 'q']); // it is taken for one that can be seen, for a while
  assert.deepEqual(sockets[0].take(), [
    { type: 'resume' },
    { type: 'subscribe', pages: ['p'] },
    { type: 'join', page: 'q' },
  ]);
  await tick(5_000);
  assert.deepEqual(sockets[0].take(), [{ type: 'pause' }]);
  first.join('q');
  await settle();
  assert.deepEqual(sockets[0].take(), [], 'a pause brings none');
  document.hidden = false;
  first.page.dispatchEvent(new Event('visibilitychange'));
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'resume' }, { type: 'subscribe', pages: ['q'] }]);
  second.close();
});

test('tabs share their counters that last, and a tab that comes later gets them, too', async () => {
  const [first, second] = [await tab([]), await tab([])];
  const seen = [[], []];
  first.counter('likes:1').watch(({ value }) => seen[0].push(value));
  await settle();
  sockets[0].welcome();
  assert.deepEqual(sockets[0].take(), [{ type: 'subscribe', counters: ['likes:1'] }]);
  second.counter('likes:1').watch(({ value }) => seen[1].push(value));
  await settle();
  assert.equal(sockets.length, 1);
  assert.deepEqual(sockets[0].take(), [{ type: 'subscribe', counters: ['likes:1'] }]);
  sockets[0].say({
    type: 'counter',
    key: 'likes:1',
    kind: 'members',
    value: 3,
    updated_at: null,
    version: '1-1',
    exact: true,
  });
  await settle();
  assert.deepEqual(seen, [[3], [3]]);
});

test('a connection of which no tab wants anything is closed, also when another tab is seen', async () => {
  const [first, second] = [await tab('p'), await tab('p')];
  sockets[0].welcome();
  await tick(2_500);
  first.leave();
  await tick(1_000);
  second.leave();
  await settle();
  for (let i = 0; i < 9; i++) await tick(500);
  assert.equal(sockets[0].closed, false, 'something may come back soon');
  await tick(500);
  assert.equal(sockets[0].closed, true);
  await tick(60_000);
  assert.deepEqual([sockets.length, first.state, second.state], [1, 'idle', 'idle']);
});

test('a page is left when the last tab leaves it', async () => {
  const first = await tab('p');
  sockets[0].welcome();
  const second = await tab('p');
  sockets[0].take();
  first.leave();
  await settle();
  assert.deepEqual(sockets[0].take(), []);
  second.leave();
  await settle();
  assert.deepEqual(sockets[0].take().filter((frame) => frame.type === 'leave'), [{ type: 'leave', page: 'p' }]);
});

test('a tab that goes without a word has a moment to come back', async () => {
  await tab('p');
  sockets[0].welcome();
  const second = await tab('q');
  sockets[0].take();
  go(second);
  await settle();
  await tick(1_900);
  assert.deepEqual(sockets[0].take(), []);
  const third = await tab('q'); // it was a reload
  await tick(5_000);
  assert.deepEqual(sockets[0].take().filter((frame) => frame.type !== 'subscribe'), []);
  go(third);
  await settle();
  await tick(2_000);
  assert.deepEqual(sockets[0].take(), [{ type: 'leave', page: 'q' }, { type: 'unsubscribe', pages: ['q'] }]);
});

test('when the tab with the connection is closed, another takes over', async () => {
  const first = await tab('p');
  sockets[0].welcome();
  const second = await tab('p');
  const third = await tab('q');
  sockets[0].take();
  go(first);
  await settle();
  assert.equal(sockets[0].closed, true);
  assert.deepEqual(sockets[0].take(), [], 'without a leave');
  assert.equal(sockets.length, 2);
  sockets[1].welcome();
  await settle();
  assert.deepEqual(sockets[1].take(), [{ type: 'join', page: 'p' }, { type: 'join', page: 'q' }]);
  sockets[1].say(count('q', 7, '1-1'));
  await settle();
  assert.deepEqual([second.counts, third.counts, second.state, third.state], [[], [7], 'open', 'open']);
  first.page.dispatchEvent(new Event('pageshow')); // from "back": it is one of the others now
  await settle();
  assert.equal(sockets.length, 2);
  assert.equal(first.state, 'open');
});

test('a tab that has the connection and sleeps loses it, and waits for it again', async () => {
  const first = await tab('p');
  sockets[0].welcome();
  const second = await tab('q');
  channels[0].asleep = true;
  second.page.dispatchEvent(new Event('online'));
  await settle();
  await tick(2_999);
  assert.equal(sockets.length, 1);
  await tick(1);
  assert.equal(sockets.length, 2);
  assert.equal(sockets[0].closed, true);
  channels[0].asleep = false;
  sockets[1].welcome();
  first.page.dispatchEvent(new Event('online'));
  await settle();
  assert.deepEqual(new Set(sockets[1].take().map((frame) => frame.page)), new Set(['p', 'q']));
  assert.equal(first.state, 'open');
  go(second);
  await settle();
  assert.equal(sockets.length, 3, 'the first has it again');
});

test('a silent tab whose answer comes in time keeps the connection', async () => {
  await tab('p');
  sockets[0].welcome();
  const second = await tab('q');
  for (let i = 0; i < 10; i++) {
    second.page.dispatchEvent(new Event('online'));
    await settle();
    await tick(1_000);
  }
  assert.equal(sockets.length, 1);
});

test('a tab that wants more pages than a connection has room for gets its own connection', async () => {
  await tab(Array.from({ length: 60 }, (_, i) => `a${i}`));
  sockets[0].welcome();
  const second = await tab(Array.from({ length: 60 }, (_, i) => `b${i}`));
  assert.equal(sockets.length, 2);
  sockets[1].welcome();
  assert.equal(sockets[1].take().length, 60);
  assert.equal(second.state, 'open');
});

test('a tab with the connection that grows too large gives it up', async () => {
  const first = await tab(Array.from({ length: 60 }, (_, i) => `a${i}`));
  sockets[0].welcome();
  await tab(Array.from({ length: 30 }, (_, i) => `b${i}`));
  for (let i = 0; i < 30; i++) first.join(`c${i}`);
  await settle();
  assert.equal(sockets.length, 3);
  assert.equal(sockets[0].closed, true);
  assert.deepEqual(sockets[0].take().filter((frame) => frame.type === 'leave'), []);
  for (const socket of sockets.slice(1)) socket.welcome();
  await settle();
  assert.deepEqual(sockets.slice(1).map((socket) => socket.take().length).sort(), [30, 90]);
});

test('a tab that comes back from the cache at once is not taken for gone', async () => {
  await tab('p');
  sockets[0].welcome();
  const second = await tab('q');
  go(second);
  await settle();
  await tick(500);
  second.page.dispatchEvent(new Event('pageshow'));
  await settle();
  sockets[0].take();
  await tick(10_000);
  assert.deepEqual(sockets[0].take(), []);
  assert.equal(second.state, 'open');
});

test('where locks are forbidden each tab has its own connection', async () => {
  navigator.locks = { request: () => Promise.reject(new DOMException('no', 'SecurityError')) };
  await tab('p');
  const second = await tab('p');
  assert.equal(sockets.length, 2);
  sockets[1].welcome();
  assert.equal(second.state, 'open');
});

test('where channels are forbidden each tab has its own connection', async () => {
  globalThis.BroadcastChannel = class {
    constructor() {
      throw new DOMException('no', 'SecurityError');
    }
  };
  await tab('p');
  await tab('p');
  assert.equal(sockets.length, 2);
});

test('a tab that only looks notices that the one with the connection sleeps', async () => {
  await tab('p');
  sockets[0].welcome();
  await tab('p');
  assert.equal(sockets.length, 1);
  channels[0].asleep = true;
  await tick(5_000); // it asks now and then
  await tick(3_000);
  assert.equal(sockets.length, 2);
});

test('of the tokens of several tabs one that has expired is passed over', async () => {
  const token = (n) => `x.${btoa(JSON.stringify({ sub: 'ann', n }))}.y`;
  await tab('p', { token: token(1) });
  sockets[0].welcome();
  await tab('p', { token: token(2) });
  sockets[0].say({ type: 'error', code: 'token_expired', message: 'expired' });
  sockets[0].drop();
  await tick(1_000);
  assert.equal(sockets[1].url.searchParams.get('token'), token(2));
});

test('a tab whose fixed token is not taken any more leaves the connection to one that can ask for another', async () => {
  const token = (n) => `x.${btoa(JSON.stringify({ sub: 'ann', n }))}.y`;
  mock.method(console, 'error', () => {});
  const first = await tab('p', { token: token(1) });
  sockets[0].welcome();
  const second = await tab('q', { token: async () => token(2) });
  document.hidden = true; // it is the other one that is looked at
  sockets[0].say({ type: 'error', code: 'token_expired', message: 'expired' });
  sockets[0].drop();
  await settle();
  await tick(3_000);
  assert.equal(sockets[1]?.url.searchParams.get('token'), token(2));
  sockets[1].welcome();
  await settle();
  const joined = () => sockets.at(-1).take().filter(({ type }) => type === 'join').map(({ page }) => page);
  assert.deepEqual(joined().sort(), ['p', 'q'], 'for both');
  assert.deepEqual([first.state, second.state], ['open', 'open']);

  // Without the one that can ask, the other has nothing to connect with; it tries once.
  go(second);
  await settle();
  assert.equal(sockets[2].url.searchParams.get('token'), token(1));
  sockets[2].say({ type: 'error', code: 'token_expired', message: 'expired' });
  sockets[2].drop();
  await settle();
  await tick(60_000);
  assert.equal(sockets.length, 3);
});

test('a tab that is refused leaves the connection to one that can ask for a token', async () => {
  const token = (n) => `x.${btoa(JSON.stringify({ sub: 'ann', n }))}.y`;
  mock.method(console, 'error', () => {});
  globalThis.fetch = async (url, { method = 'GET' }) =>
    method === 'PUT' ? Response.json({ detail: 'expired' }, { status: 401 }) : Response.json({ counters: [] });
  for (let failures = 1; failures < 20; failures++) await import(`../rescue.js?${failures}`);
  await tab('p', { token: token(1) });
  await tab('q', { token: async () => token(2) });
  for (let i = 0; i < 60; i++) {
    if (sockets.at(-1).url.searchParams.get('token') === token(1)) sockets.at(-1).drop();
    await settle();
    await tick(500);
  }
  assert.equal(sockets.at(-1).url.searchParams.get('token'), token(2));
});

test('a user who cannot be told apart shares with nobody', async () => {
  await tab('p');
  await tab('p', { token: 'opaque' });
  await tab('p', { token: async () => Promise.reject(new Error('sign in first')) });
  assert.equal(sockets.length, 2, 'and the third has no token to connect with');
  assert.equal(tabs[2].state, 'waiting');
});

test('tabs of different users share nothing, those of one user do, whatever the token', async () => {
  const token = (sub, n) => `x.${btoa(JSON.stringify({ sub, n }))}.y`;
  await tab('p', { token: token('ann', 1) });
  await tab('p', { token: async () => token('bob', 1) });
  await tab('p', { token: token('ann', 2) });
  await tab('p');
  assert.equal(sockets.length, 3);
  assert.deepEqual(
    sockets.map((socket) => socket.url.searchParams.get('token')),
    [token('ann', 1), token('bob', 1), null],
  );
});

test('a first change waits until the tab with the connection knows who the user is', async () => {
  const said = [];
  globalThis.fetch = async (_, { headers }) => {
    said.push(headers['Headcount-Id']);
    return Response.json({ key: 'likes:1', kind: 'members', value: 1, updated_at: null, version: '1-1', exact: true });
  };
  await import('../more.js');
  await tab('p', { server: 'https://waits.example' });
  const second = await tab('p', { server: 'https://waits.example' });
  const changed = second.counter('likes:1').add();
  await settle();
  assert.deepEqual(said, []);
  FakeWebSocket.prototype.welcome.call(sockets[0], { id: signed('first') });
  await settle();
  await changed;
  assert.deepEqual(said, [signed('first')]);
});

test('all tabs of a user whose session ends ask whose it is now', async () => {
  const token = (sub) => `x.${btoa(JSON.stringify({ sub }))}.y`;
  let now = token('ann');
  const [first, second, third] = [
    await tab('p', { token: async () => now }),
    await tab('q', { token: async () => now }),
    await tab('r', { token: token('ann') }),
  ];
  sockets[0].welcome();
  await settle();
  now = token('bob');
  second.token = async () => now;
  await settle();
  await tick(3_000);
  await settle();
  const open = sockets.filter((socket) => !socket.closed);
  assert.deepEqual(open.map((socket) => socket.url.searchParams.get('token')).sort(), [token('ann'), now].sort());
  for (const socket of open) socket.welcome();
  await settle();
  const joined = (sub) =>
    open
      .find((socket) => socket.url.searchParams.get('token') === token(sub))
      .take()
      .filter(({ type }) => type === 'join')
      .map(({ page }) => page)
      .sort();
  assert.deepEqual([joined('ann'), joined('bob')], [['r'], ['p', 'q']]);
  assert.deepEqual([first, second, third].map(({ state }) => state), ['open', 'open', 'open']);
});

test('a token that is set while an older one is awaited holds, whichever comes first', async () => {
  const token = (sub) => `x.${btoa(JSON.stringify({ sub }))}.y`;
  for (const first of ['ann', 'bob']) {
    const server = `https://${first}-first.example`;
    await tab('p', { server, token: async () => token('ann') });
    sockets.at(-1).welcome();
    const answers = []; // of the session's token: it was ann's, and is bob's
    const ask = () => new Promise((answer) => answers.push(answer));
    const second = await tab('q', { server, token: ask });
    second.token = ask;
    const tell = async (who) => {
      answers[who === 'ann' ? 0 : 1](token(who));
      await settle();
    };
    await tell(first);
    await tell(first === 'ann' ? 'bob' : 'ann');
    for (const answer of answers) answer(token('bob'));
    await settle();
    for (const answer of answers) answer(token('bob'));
    await settle();
    const users = sockets.filter(({ url }) => url.hostname === new URL(server).hostname);
    assert.deepEqual(users.map(({ url }) => url.searchParams.get('token')), [token('ann'), token('bob')]);
  }
});

test('a log-out in one tab is one in all tabs, whichever has the connection', async () => {
  const token = (sub) => `x.${btoa(JSON.stringify({ sub }))}.y`;
  for (const which of [0, 1]) {
    const server = `https://out${which}.example`;
    let now = token('ann');
    const both = [
      await tab('p', { server, token: async () => now }),
      await tab('q', { server, token: async () => now }),
    ];
    sockets.at(-1).welcome();
    await settle();
    now = '';
    both[which].close();
    await settle();
    await tick(3_000);
    await settle();
    const open = sockets.filter(({ url, closed }) => url.hostname === new URL(server).hostname && !closed);
    assert.deepEqual(open.map(({ url }) => url.searchParams.get('token')), [null], `tab ${which}`);
  }

  const stays = [await tab('p'), await tab('q')];
  sockets.at(-1).welcome();
  const before = sockets.length;
  stays[1].close();
  await settle();
  assert.equal(sockets.length, before, 'who stays the same user keeps the connection');
});

test('where a lock is never granted, nor refused, each tab has its own connection after a while', async () => {
  navigator.locks = { request: () => new Promise(() => {}) };
  const headcount = await tab('p');
  await tick(2_999);
  assert.equal(sockets.length, 0);
  await tick(1);
  assert.equal(sockets.length, 1);
  sockets[0].welcome();
  assert.deepEqual([headcount.state, sockets[0].take()], ['open', [{ type: 'join', page: 'p' }]]);
});

test('a lock that is granted too late changes nothing', async () => {
  const late = [];
  navigator.locks = { request: (...all) => new Promise((resolve) => late.push(() => resolve(all[2]()))) };
  await tab('p');
  await tick(3_000);
  sockets[0].welcome();
  late.forEach((grant) => grant());
  await tick(10_000);
  assert.equal(sockets.length, 1);
  assert.equal(sockets[0].closed, false);
});

test('unread goes to all tabs, also to one that comes later; read is said once', async () => {
  const first = await tab('p');
  sockets[0].welcome();
  const heard = [];
  first.unread((n) => heard.push(`first ${n}`));
  await settle();
  sockets[0].say({ type: 'unread', count: 3 });
  const second = await tab('p');
  second.unread((n) => heard.push(`second ${n}`));
  await settle();
  assert.deepEqual(heard, ['first 3', 'second 3']);
  sockets[0].take();
  second.read();
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'read' }]);
  sockets[0].say({ type: 'unread', count: 0 });
  await settle();
  assert.deepEqual(heard.slice(2), ['first 0', 'second 0']);
});

test('what a user read is not read for the next one', async () => {
  const token = (sub) => `x.${btoa(JSON.stringify({ sub }))}.y`;
  await tab('p', { token: token('ann') });
  sockets[0].welcome();
  const second = await tab('q', { token: token('ann') });
  channels[0].asleep = true;
  second.read();
  await settle();
  second.token = token('bob');
  await settle();
  sockets[1].welcome();
  assert.deepEqual(sockets[1].take(), [{ type: 'join', page: 'q' }]);
});

test('messages of others that make no sense are ignored', async () => {
  const one = await tab();
  const two = await tab();
  sockets[0].welcome();
  const forger = new FakeChannel(channels[0].name);
  const all = [
    null,
    7,
    'x',
    [],
    { from: 1 },
    { from: 1, wants: null },
    { from: 1, wants: { join: 'x' } },
    { from: 1, wants: { join: [], watch: {} } },
    { id: {} },
    { frame: null },
    { frame: { type: 'count' } },
    { frame: { type: 'counter', key: 3 } },
  ];
  const thrown = [];
  for (const data of all)
    for (const channel of channels)
      try {
        channel.onmessage?.({ data });
      } catch (error) {
        thrown.push(`${JSON.stringify(data)}: ${error}`);
      }
  await settle();
  assert.deepEqual(thrown, []);
  forger.close();
  sockets[0].say(count('p', 2, '1-1'));
  await settle();
  assert.deepEqual([one.counts, two.counts, sockets.length], [[2], [2], 1]);
});

test('a tab that does not want to share does not', async () => {
  await tab('p');
  await tab('p', { share: false });
  assert.equal(sockets.length, 2);
});

test('a page that the server refuses is given up by all', async () => {
  const first = await tab(['good', 'bad']);
  sockets[0].welcome();
  const second = await tab('bad');
  sockets[0].take();
  await tab('private');
  sockets[0].take();
  sockets[0].say({ type: 'error', code: 'bad_page', message: 'no', page: 'bad' });
  sockets[0].say({ type: 'error', code: 'forbidden', message: 'no', page: 'private' });
  await tick(0);
  assert.deepEqual(sockets[0].take(), [{ type: 'join', page: 'good' }]);
  second.join('fine');
  first.join('well');
  await settle();
  assert.deepEqual(sockets[0].take().map((frame) => frame.page), ['well', 'fine']);
});

// The client's logic, against a WebSocket and a clock that these tests make.
import assert from 'node:assert/strict';
import { afterEach, beforeEach, mock, test } from 'node:test';

import { Headcount } from '../headcount.js';
import { FakeWebSocket, settle, signed, sockets, tick } from './fake.js';

const SERVER = 'https://count.example';
let clients;
let storage;

// The client loads this after a failed attempt. It is loaded here first, so that no test waits for it.
for (let failures = 1; failures < 20; failures++) await import(`../rescue.js?${failures}`);
const { default: draw, followed } = await import('../more.js');
const { attend } = await import('../live.js');

function client(options, url = SERVER) {
  const headcount = new Headcount(url, options);
  headcount.states = [];
  headcount.errors = [];
  headcount.addEventListener('state', ({ detail }) => headcount.states.push(detail));
  headcount.addEventListener('error', ({ detail }) => headcount.errors.push(detail));
  clients.push(headcount);
  return headcount;
}

/** A client on page p, welcome at its first socket. */
async function connected(options) {
  const headcount = client(options);
  headcount.join('p');
  await settle();
  sockets[0].welcome();
  await settle();
  return headcount;
}

const count = (page, number, version, more) => ({
  type: 'count', page, count: number, updated_at: '2030-10-10T12:11:42Z', version, ...more,
});

beforeEach(() => {
  sockets.length = 0;
  clients = [];
  storage = {};
  mock.timers.enable({ apis: ['setTimeout'] });
  mock.method(Math, 'random', () => 0.5);
  globalThis.WebSocket = FakeWebSocket;
  globalThis.localStorage = storage;
  const page = new EventTarget();
  globalThis.addEventListener = page.addEventListener.bind(page);
  globalThis.dispatchEvent = page.dispatchEvent.bind(page);
  globalThis.navigator ??= {};
  globalThis.fetch = () => Promise.reject(new TypeError('no network'));
  globalThis.document = { hidden: false };
  globalThis.location = new URL('https://site.example/path');
});

afterEach(() => {
  clients.forEach((c) => c.close());
  mock.timers.reset();
  mock.restoreAll();
});

test('it connects when something is wanted, once, with the subprotocol', async () => {
  const headcount = client({}, 'https://count.example');
  await tick(60_000);
  assert.equal(sockets.length, 0);
  assert.equal(headcount.state, 'idle');

  headcount.join('p');
  headcount.watch(['q', '*'], () => {});
  await settle();
  assert.equal(sockets.length, 1);
  assert.equal(sockets[0].url.origin + sockets[0].url.pathname, 'wss://count.example/-/ws');
  assert.equal(sockets[0].protocol, 'headcount.v1');
  assert.deepEqual(sockets[0].take(), [], 'nothing before it is open');

  sockets[0].welcome();
  assert.deepEqual(sockets[0].take(), [{ type: 'join', page: 'p' }, { type: 'subscribe', pages: ['q', '*'] }]);
  assert.deepEqual(headcount.states, ['connecting', 'open']);
});

test('the address may have another scheme and a path', async () => {
  for (const [url, want] of [
    ['http://127.0.0.1:8080', 'ws://127.0.0.1:8080/-/ws'],
    ['wss://schemes.example', 'wss://schemes.example/-/ws'],
    ['https://schemes.example/behind/a/proxy', 'wss://schemes.example/behind/a/proxy/-/ws'],
    ['/here', 'wss://site.example/here/-/ws'],
  ]) {
    client({}, url).join('p');
    await settle();
    assert.equal(sockets.at(-1).url.href.split('?')[0], want);
  }
  assert.throws(() => new Headcount('file:///tmp/x'), TypeError);
});

test('the changes of one turn of the event loop go together', async () => {
  const headcount = await connected();
  sockets[0].take();
  headcount.leave('p');
  headcount.join('p');
  const stop = headcount.watch('q', () => {});
  stop();
  await settle();
  assert.deepEqual(sockets[0].take(), []);
});

test('a move joins the new page before it leaves the old one', async () => {
  const headcount = await connected();
  sockets[0].take();
  headcount.leave('p');
  headcount.join('q');
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'join', page: 'q' }, { type: 'leave', page: 'p' }]);
});

test('a move at the bound of pages leaves first', async () => {
  const headcount = await connected();
  headcount.watch(Array.from({ length: 99 }, (_, i) => `w${i}`), () => {});
  await settle();
  sockets[0].take();
  assert.throws(() => headcount.join('q'), RangeError);
  headcount.leave('p');
  headcount.join('q');
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'leave', page: 'p' }, { type: 'join', page: 'q' }]);
});

test('who is at the bound of pages is counted at the next address, too', async () => {
  const navigation = new EventTarget();
  Object.assign(globalThis, { navigation, MutationObserver: class { observe() {} } });
  const headcount = client();
  let path = '/a';
  headcount.watch(Array.from({ length: 99 }, (_, i) => `w${i}`), () => {});
  attend(headcount, () => {}, undefined, false, () => path, new AbortController().signal);
  await settle();
  sockets[0].welcome();
  sockets[0].take();
  path = '/b';
  navigation.dispatchEvent(new Event('currententrychange'));
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'leave', page: '/a' }, { type: 'join', page: '/b' }]);
});

test('a page is left when its last join is taken back, and leave() leaves them all', async () => {
  const headcount = await connected();
  const release = headcount.join('p');
  const again = headcount.join('q');
  headcount.join('q');
  await settle();
  sockets[0].take();
  release();
  release();
  again();
  await settle();
  assert.deepEqual(sockets[0].take(), [], 'others still hold both');
  headcount.leave();
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'leave', page: 'p' }, { type: 'leave', page: 'q' }]);
});

test('a leave does not end watching, and the end of watching does not end a join', async () => {
  const headcount = await connected();
  sockets[0].take();
  const stop = headcount.watch('p', () => {});
  await settle();
  assert.deepEqual(sockets[0].take(), [], 'the join has subscribed');
  headcount.leave('p');
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'subscribe', pages: ['p'] }, { type: 'leave', page: 'p' }]);
  headcount.join('p');
  stop();
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'join', page: 'p' }], 'no unsubscribe: it would end the counts');
  headcount.leave('p');
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'leave', page: 'p' }, { type: 'unsubscribe', pages: ['p'] }]);
});

test('many long pages go in frames under 4,096 bytes', async () => {
  const headcount = client();
  const pages = Array.from({ length: 100 }, (_, i) => `${i}${'😀'.repeat(120)}`);
  headcount.watch(pages, () => {});
  await settle();
  sockets[0].welcome();
  const frames = sockets[0].take();
  assert.ok(frames.length > 1);
  for (const frame of frames) assert.ok(Buffer.byteLength(JSON.stringify(frame)) <= 4_096);
  assert.deepEqual(frames.flatMap((frame) => frame.pages), pages);
});

test('invalid pages are refused where the caller sees it', () => {
  const headcount = client();
  for (const page of ['', '-', '.', '..', 'x'.repeat(129), undefined, 7, null])
    assert.throws(() => headcount.join(page), TypeError, String(page));
  assert.throws(() => headcount.join('*'), TypeError);
  headcount.join('😀'.repeat(128));
});

test('an older count is passed over, and each count comes once', async () => {
  const headcount = await connected();
  const seen = [];
  headcount.watch('p', (counter) => seen.push(counter));
  sockets[0].say(count('p', 1, '17-1'));
  sockets[0].say(count('p', 3, '17-3'));
  sockets[0].say(count('p', 2, '17-2'));
  sockets[0].say(count('p', 3, '17-3'));
  sockets[0].say(count('elsewhere', 9, '17-9'));
  assert.deepEqual(seen.map((c) => c.count), [1, 3]);
  assert.deepEqual(Object.keys(seen[0]), ['page', 'count', 'updated_at', 'version']);

  sockets[0].say(count('p', 3, '17-3', { stale: true }));
  sockets[0].say(count('p', 3, '17-3'));
  assert.deepEqual(seen.slice(2).map((c) => !!c.stale), [true, false], 'whether it is stale matters');
});

test('versions are ordered by incarnation, then by sequence, as numbers', async () => {
  const headcount = await connected();
  const seen = [];
  for (const [older, newer] of [
    ['0-0', '1-0'],
    ['1700000000000-9', '1700000000000-10'],
    ['1700000000000-999', '1700000000001-1'],
    ['9-1', '10-0'],
    ['1-9007199254740992', '1-9007199254740993'],
  ]) {
    const page = `v ${older}`;
    headcount.watch(page, ({ version }) => seen.push(version));
    seen.length = 0;
    sockets[0].say(count(page, 1, older));
    sockets[0].say(count(page, 2, newer));
    sockets[0].say(count(page, 3, older));
    assert.deepEqual(seen, [older, newer]);
  }
});

test('a later watch gets the known count, unless it ends before that', async () => {
  const headcount = await connected();
  sockets[0].say(count('p', 4, '17-4'));
  const seen = [];
  headcount.watch('p', (c) => seen.push(c.count));
  headcount.watch('p', (c) => seen.push(-c.count))();
  assert.deepEqual(seen, []);
  await settle();
  assert.deepEqual(seen, [4]);
});

test('a callback that throws does not keep the others from their count', async () => {
  const headcount = await connected();
  const thrown = [];
  globalThis.reportError = (error) => thrown.push(error.message);
  const seen = [];
  headcount.watch('p', () => {
    throw new Error('mine');
  });
  headcount.watch('p', (c) => seen.push(c.count));
  sockets[0].say(count('p', 1, '17-1'));
  assert.deepEqual(seen, [1]);
  assert.deepEqual(thrown, ['mine']);
});

test('a watch that another callback has ended hears nothing more, nor does who is logged out by one', async () => {
  const headcount = await connected();
  const seen = [];
  headcount.watch('p', () => stop());
  const stop = headcount.watch('p', ({ count }) => seen.push(count));
  sockets[0].say(count('p', 1, '17-1'));
  assert.deepEqual(seen, []);

  headcount.unread((n) => n && headcount.close());
  headcount.unread((n) => seen.push(n));
  await settle();
  sockets[0].say({ type: 'unread', count: 3 });
  assert.deepEqual(seen, [0]);
});

test('across a reconnect an older count does not come back, a later incarnation does', async () => {
  const headcount = await connected();
  const seen = [];
  headcount.watch('p', (c) => seen.push(c.count));
  sockets[0].say(count('p', 5, '17-50'));
  sockets[0].drop();
  await tick(500);
  sockets[1].welcome();
  sockets[1].say(count('p', 4, '17-49'));
  assert.deepEqual(seen, [5]);
  sockets[1].say(count('p', 1, '18-1'));
  assert.deepEqual(seen, [5, 1]);
});

test('a server that has forgotten a page is believed, once and on a new connection only', async () => {
  const headcount = await connected();
  const seen = [];
  headcount.watch('q', (c) => seen.push(c.count));
  await settle();
  sockets[0].say(count('q', 5, '17-5'));
  sockets[0].say(count('q', 0, '0-0'));
  assert.deepEqual(seen, [5], 'on the same connection it is an old one');
  sockets[0].drop();
  await tick(500);
  sockets[1].welcome();
  sockets[1].say(count('q', 0, '0-0', { updated_at: null }));
  assert.deepEqual(seen, [5, 0]);
});

test('after a loss it joins and subscribes again', async () => {
  const headcount = await connected();
  headcount.watch(['q', 'r'], () => {});
  await settle();
  headcount.join('s');
  await settle();
  sockets[0].drop();
  assert.equal(headcount.state, 'waiting');
  await tick(500);
  sockets[1].welcome();
  assert.deepEqual(sockets[1].take(), [
    { type: 'join', page: 'p' },
    { type: 'join', page: 's' },
    { type: 'subscribe', pages: ['q', 'r'] },
  ]);
  assert.deepEqual(headcount.states, ['connecting', 'open', 'waiting', 'connecting', 'open']);
});

test('for a minute attempts are at most two seconds apart, later half a minute, with full jitter', async () => {
  client().join('p');
  await settle();
  for (const ms of [500, ...Array(58).fill(1_000), 15_000, 15_000]) {
    const before = sockets.length;
    sockets.at(-1).drop();
    await tick(ms - 1);
    assert.equal(sockets.length, before, `not before ${ms} ms`);
    await tick(1);
    assert.equal(sockets.length, before + 1, `after ${ms} ms`);
  }
  Math.random.mock.mockImplementation(() => 0);
  sockets.at(-1).drop();
  await tick(0);
  assert.equal(sockets.length, 63, 'jitter reaches down to nothing');
});

test('only a connection that lasted a while makes the client forget earlier failures', async () => {
  await connected();
  sockets[0].drop();
  await tick(500);
  sockets[1].welcome();
  await tick(9_000);
  sockets[1].drop();
  await tick(999);
  assert.equal(sockets.length, 2, 'the second failure in a row waits longer');
  await tick(1);
  sockets[2].welcome();
  await tick(10_000);
  sockets[2].drop();
  await tick(500);
  assert.equal(sockets.length, 4, 'the first failure again');
});

test('after silence the client sends a heartbeat, then connects again', async () => {
  const headcount = await connected();
  sockets[0].take();
  await tick(14_999);
  assert.deepEqual(sockets[0].take(), []);
  await tick(1);
  assert.deepEqual(sockets[0].take(), [{ type: 'heartbeat' }]);
  sockets[0].say({ type: 'heartbeat' });
  await tick(10_000);
  sockets[0].say(count('p', 1, '17-1')); // any frame is life
  await tick(14_999);
  assert.deepEqual(sockets[0].take(), []);
  await tick(1);
  assert.deepEqual(sockets[0].take(), [{ type: 'heartbeat' }]);
  await tick(4_999);
  assert.equal(headcount.state, 'open');
  await tick(1);
  assert.equal(sockets[0].closed, true);
  assert.equal(headcount.state, 'waiting');
  sockets[0].say(count('p', 7, '17-7')); // whatever it still sends is ignored
  await tick(500);
  assert.equal(sockets.length, 2);
});

test('the welcome names the heartbeat', async () => {
  client().join('p');
  await settle();
  sockets[0].welcome({ heartbeat_ms: 1_000 });
  sockets[0].take();
  await tick(1_000);
  assert.deepEqual(sockets[0].take(), [{ type: 'heartbeat' }]);
});

test('a connection that never opens is given up', async () => {
  client().join('p');
  await settle();
  await tick(20_000);
  assert.equal(sockets[0].closed, true);
  await tick(500);
  assert.equal(sockets.length, 2);
});

test('a reconnect frame: the new connection first, then the end of the old one', async () => {
  const headcount = await connected();
  const seen = [];
  headcount.watch('p', (c) => seen.push(c.count));
  sockets[0].say({ type: 'reconnect', after_ms: 1_234 });
  sockets[0].say({ type: 'reconnect', after_ms: 1 }); // said once is enough
  await tick(1_233);
  assert.equal(sockets.length, 1);
  await tick(1);
  assert.equal(sockets.length, 2);
  sockets[0].say(count('p', 2, '17-2'));
  assert.equal(sockets[0].closed, false, 'still counted there');
  sockets[1].welcome();
  assert.deepEqual(sockets[1].take(), [{ type: 'join', page: 'p' }]);
  assert.equal(sockets[0].closed, true);
  assert.ok(!sockets[0].take().some((f) => f.type === 'leave'), 'no leave: nobody went');
  sockets[1].say(count('p', 2, '17-2'));
  assert.deepEqual(seen, [2]);
  assert.deepEqual(headcount.states, ['connecting', 'open'], 'nothing to see');
  await tick(14_000);
  assert.equal(sockets.length, 2);
});

test('a reconnect frame with nowhere to go: the old connection lasts while the server lets it', async () => {
  const headcount = await connected();
  sockets[0].say({ type: 'reconnect', after_ms: 100 });
  await tick(100);
  sockets[1].drop();
  assert.equal(headcount.state, 'open');
  await tick(500);
  sockets[2].drop();
  sockets[0].drop();
  assert.equal(headcount.state, 'waiting');
  await tick(30_000);
  sockets[3].welcome();
  assert.deepEqual(sockets[3].take(), [{ type: 'join', page: 'p' }]);
  assert.equal(headcount.state, 'open');
  assert.equal(sockets.length, 4, 'one attempt at a time');
});

test('a server that dies after its reconnect frame is not waited for', async () => {
  await connected();
  sockets[0].say({ type: 'reconnect', after_ms: 14_000 });
  sockets[0].drop();
  await tick(500);
  assert.equal(sockets.length, 2);
});

test('what is joined during a handover is joined on both', async () => {
  const headcount = await connected();
  sockets[0].say({ type: 'reconnect', after_ms: 10 });
  await tick(10);
  sockets[0].take();
  sockets[1].open();
  headcount.join('q');
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'join', page: 'q' }]);
  assert.deepEqual(sockets[1].take(), [{ type: 'join', page: 'p' }, { type: 'join', page: 'q' }]);
});

test('on another origin the id goes along, from the storage', async () => {
  client({}, 'https://stored.example').join('p');
  await settle();
  assert.match(sockets[0].url.search, /^\?id=0{22}\.[0-9a-z]{22}$/, 'a seed, at first');
  sockets[0].welcome();
  assert.deepEqual(storage, { 'headcount_id https://stored.example': signed('u') });
  storage['headcount_id https://stored.example'] = signed('newer'); // by another tab
  sockets[0].drop();
  await tick(500);
  assert.equal(sockets[1].url.searchParams.get('id'), signed('newer'));
});

test('where storage is forbidden the id is kept in memory', async () => {
  const forbid = () => {
    throw new DOMException('no', 'SecurityError');
  };
  globalThis.localStorage = new Proxy({}, { get: forbid, set: forbid });
  client({}, 'https://forbidden.example').join('p');
  await settle();
  sockets[0].welcome({ id: signed('mem') });
  sockets[0].drop();
  await tick(500);
  assert.equal(sockets[1].url.searchParams.get('id'), signed('mem'));
});

test('what is stored and is no id is replaced', async () => {
  const said = answered();
  const key = 'headcount_id https://garbage.example';
  for (const garbage of ['x', '💥'.repeat(9), 'a'.repeat(1e5), '<script>', '\0\r\n']) {
    storage[key] = garbage;
    const headcount = client({}, 'https://garbage.example');
    headcount.join('p');
    await headcount.counter('likes:1').add();
    const presented = sockets.at(-1).url.searchParams.get('id');
    assert.match(presented, /^[\w-]{22}\.[\w-]{22}$/);
    assert.deepEqual([said.pop(), storage[key]], [presented, presented]);
    headcount.close();
  }
});

test('when the own origin keeps cookies no longer the user stays', async () => {
  globalThis.location = new URL('https://refused.example/page');
  document.cookie = '';
  client({}, 'https://refused.example').join('p');
  await settle();
  sockets[0].welcome({ id: signed('before') });
  Object.defineProperty(document, 'cookie', { get: () => '', set: () => {} });
  sockets[0].drop();
  await tick(500);
  assert.equal(sockets[1].url.searchParams.get('id'), signed('before'));
});

test('on its own origin the cookie says who the user is', async () => {
  globalThis.location = new URL(`${SERVER}/page`);
  document.cookie = '';
  await connected();
  assert.match(
    document.cookie,
    /^headcount_new_[0-9a-z]{8}=0{22}\.[0-9a-z]{22};path=\/;max-age=60;samesite=lax$/,
    'a seed, for a minute',
  );
  assert.equal(sockets[0].url.search, '');
  sockets[0].drop();
  await tick(500);
  assert.match(sockets[1].url.search, /^\?back=\d+(\.\d+)?$/, 'and how long ago it was welcomed');
});

/** Has changes of counters answered, and returns what they said of who the user is. */
function answered() {
  const said = [];
  globalThis.fetch = async (url, { headers }) => {
    said.push(headers['Headcount-Id'] ?? headers.Authorization);
    return Response.json(lasting('likes:1', 1, '1-1'));
  };
  return said;
}

test('all calls of a first visit say the same of who the user is', async () => {
  const said = answered();
  const headcount = client({}, 'https://first.example');
  headcount.join('p');
  await Promise.all([headcount.counter('likes:1').add(), headcount.counter('likes:1').add(), headcount.follow('p')]);
  const seed = sockets[0].url.searchParams.get('id');
  assert.match(seed, /^0{22}\./);
  assert.deepEqual(said, [seed, seed, seed]);
  assert.deepEqual(storage, { 'headcount_id https://first.example': seed }, 'other tabs have it, too');
  sockets[0].welcome({ id: signed('issued') });
  await headcount.counter('likes:1').add();
  assert.equal(said.at(-1), signed('issued'));

  globalThis.location = new URL('https://first.example/');
  document.cookie = '';
  await client({}, 'https://first.example').counter('likes:1').add();
  assert.equal(said.at(-1), undefined, 'on its own origin a cookie says it');
  assert.match(document.cookie, /^headcount_new_/);
});

test('where the own origin keeps no cookie the id goes along', async () => {
  const said = answered();
  globalThis.location = new URL('https://framed.example/page');
  Object.defineProperty(document, 'cookie', { get: () => '', set: () => {} });
  const headcount = client({}, 'https://framed.example');
  headcount.join('p');
  await settle();
  assert.equal(sockets[0].url.searchParams.get('storage'), 'partitioned');
  sockets[0].welcome({ id: signed('framed') });
  sockets[0].drop();
  await tick(500);
  assert.equal(sockets[1].url.searchParams.get('id'), signed('framed'));
  await headcount.counter('likes:1').add();
  assert.deepEqual(said, [signed('framed')]);
  assert.deepEqual(storage, { 'headcount_id https://framed.example': signed('framed') }, 'for a reload');
});

test('servers on two paths of a host keep an id each, and take over that of before', async () => {
  storage['headcount_id https://paths.example'] = signed('before');
  for (const path of ['one', 'two']) client({}, `https://paths.example/${path}/`).join('p');
  await settle();
  assert.deepEqual(sockets.map(({ url }) => new URL(url).searchParams.get('id')), [signed('before'), signed('before')]);

  sockets.forEach((socket, i) => socket.welcome({ id: signed(`${i}`) }));
  await settle();
  assert.equal(storage['headcount_id https://paths.example/one'], signed('0'));
  assert.equal(storage['headcount_id https://paths.example/two'], signed('1'));
});

test('a user with a token has neither seed nor cookie', async () => {
  const said = answered();
  globalThis.location = new URL('https://tokens.example/');
  document.cookie = '';
  const headcount = client({ token: 't' }, 'https://tokens.example');
  headcount.join('p');
  await headcount.counter('likes:1').add();
  sockets[0].welcome({ id: undefined });
  assert.deepEqual([said, storage, document.cookie, sockets[0].url.search], [['Bearer t'], {}, '', '?token=t']);
});

const tokenOf = (sub, n = 0) => `x.${Buffer.from(JSON.stringify({ sub, n })).toString('base64url')}.y`;

test('another user begins a new connection at once, and nothing of the first one stays', async () => {
  const headcount = await connected({ token: tokenOf('ann') });
  const seen = [];
  headcount.unread((n) => seen.push(n));
  headcount.counter('likes:1').watch(({ value, mine = false }) => seen.push(`${value} ${mine}`));
  await settle();
  sockets[0].say({ type: 'unread', count: 3 });
  sockets[0].say(lasting('likes:1', 5, '1-1', { mine: true }));
  sockets[0].take();
  headcount.token = tokenOf('ann', 1);
  await settle();
  assert.equal(sockets.length, 1, 'the same user');
  headcount.token = tokenOf('bjørn? >');
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'leave', page: 'p' }, { type: 'unsubscribe', counters: ['likes:1'] }]);
  assert.equal(sockets[0].closed, true);
  assert.deepEqual(seen, [3, '5 true', 0, '5 false']);
  assert.equal(sockets[1].url.searchParams.get('token'), tokenOf('bjørn? >'));
  sockets[1].welcome({ id: undefined });
  assert.deepEqual(sockets[1].take(), [{ type: 'join', page: 'p' }, { type: 'subscribe', counters: ['likes:1'] }]);
  sockets[1].say({ type: 'unread', count: 1 });
  sockets[1].say(lasting('likes:1', 5, '1-1', { mine: true }));
  assert.deepEqual(seen.slice(4), [1, '5 true']);
  headcount.token = undefined; // logged out
  await settle();
  assert.deepEqual(seen.slice(6), [0, '5 false']);
  assert.equal(sockets[2].url.searchParams.get('token'), null);
});

test('a function that names another user at a reconnect begins a new connection', async () => {
  let token = tokenOf('ann');
  const headcount = await connected({ token: async () => token });
  const unread = [];
  headcount.unread((n) => unread.push(n));
  sockets[0].say({ type: 'unread', count: 3 });
  token = tokenOf('bob');
  sockets[0].drop();
  await tick(500);
  await tick(1_000);
  assert.deepEqual(unread, [3, 0]);
  assert.equal(sockets.at(-1).url.searchParams.get('token'), token);
  assert.equal(sockets.length, 2);
});

test('a token is asked for at every connection, and replaces the id', async () => {
  let number = 0;
  const headcount = await connected({ token: async () => `t${++number}` });
  assert.equal(sockets[0].url.search, '?token=t1');
  sockets[0].say({ type: 'error', code: 'token_expired', message: 'expired' });
  sockets[0].drop();
  await tick(500);
  assert.match(sockets[1].url.search, /^\?token=t2&back=\d/);
  assert.equal(headcount.errors[0].code, 'token_expired');
});

test('a fixed token that has expired is not tried again, until there is another', async () => {
  const complaints = mock.method(console, 'error', () => {});
  const headcount = await connected({ token: 'old' });
  sockets[0].say({ type: 'error', code: 'token_expired', message: 'expired' });
  sockets[0].drop();
  await tick(60_000);
  headcount.join('q');
  await settle();
  assert.equal(sockets.length, 1);
  assert.deepEqual(complaints.mock.calls.map((call) => call.arguments), [['expired']], 'the console says so once');
  assert.equal(headcount.state, 'waiting');
  headcount.token = 'new';
  await settle();
  assert.match(sockets[1].url.search, /^\?token=new&back=\d/);
});

test('a fixed token that has expired may be replaced by a function', async () => {
  mock.method(console, 'error', () => {});
  const headcount = await connected({ token: tokenOf('ann') });
  sockets[0].say({ type: 'error', code: 'token_expired', message: 'expired' });
  sockets[0].drop();
  await tick(60_000);
  assert.equal(sockets.length, 1);
  headcount.token = async () => tokenOf('ann', 1);
  await settle();
  assert.equal(sockets[1]?.url.searchParams.get('token'), tokenOf('ann', 1));
});

test('the token that expires is that of the connection, not the newest', async () => {
  const headcount = await connected({ token: 'old' });
  headcount.token = 'new';
  await settle();
  sockets[0].say({ type: 'error', code: 'token_expired', message: 'expired' });
  sockets[0].drop();
  await tick(1_000);
  assert.match(sockets[1].url.search, /^\?token=new&back=\d/);
});

test('a token function that fails is a failed attempt', async () => {
  let fail = true;
  const headcount = client({
    token: async () => {
      if (fail) throw new Error('sign in first');
      return 't';
    },
  });
  headcount.join('p');
  await settle();
  assert.deepEqual(headcount.errors.map((e) => e.message), ['Error: sign in first']);
  assert.equal(headcount.state, 'waiting');
  fail = false;
  await tick(500);
  assert.equal(sockets.length, 1);
});

test('a token function that throws at once fails like one whose promise is rejected', async () => {
  const headcount = await connected({ token: tokenOf('ann') });
  headcount.token = () => {
    throw new Error('sign in first');
  };
  headcount.join('q');
  await settle(); // a promise that nobody handles fails this test
  assert.equal(headcount.state, 'open', 'nobody else is here');
  sockets[0].drop();
  await tick(500);
  assert.deepEqual(headcount.errors.map((e) => e.message), ['Error: sign in first']);
});

test('a token function that never answers is a failed attempt', async () => {
  let calls = 0;
  const headcount = client({ token: () => (calls++ ? 't' : new Promise(() => {})), share: false });
  headcount.join('p');
  await settle();
  assert.equal(headcount.state, 'connecting');
  await tick(10_000);
  assert.deepEqual(headcount.errors.map((e) => e.message), ['timeout']);
  await tick(1_000);
  assert.equal(sockets.length, 1);
});

/**
 * Answers what was sent over a socket as a server does: of each frame it names the first topic that it refuses, and
 * then takes nothing of it. Returns how many frames it refused until nothing more was sent.
 */
async function serve(socket, isRefused, taken) {
  let errors = 0;
  for (let sent = socket.take(); sent.length; sent = socket.take()) {
    for (const { type, page, pages = [], counters = [] } of sent) {
      const topics = [...(page ? [page] : pages), ...counters];
      const bad = topics.find(isRefused);
      if (bad) {
        const member = counters.includes(bad) ? 'counter' : 'page';
        socket.say({ type: 'error', code: 'forbidden', message: 'no', [member]: bad });
        errors++;
      } else for (const topic of topics) taken[type === 'unsubscribe' || type === 'leave' ? 'delete' : 'add'](topic);
      if (type === 'heartbeat') socket.say({ type });
    }
    await tick(0);
  }
  return errors;
}

test('a refused page does not take the others with it', async () => {
  const headcount = client();
  headcount.watch(['good', 'b\u0000d', 'fine'], () => {});
  await settle();
  sockets[0].welcome();
  const taken = new Set();
  await serve(sockets[0], (topic) => topic === 'b\u0000d', taken);
  assert.deepEqual([...taken], ['good', 'fine']);
  assert.deepEqual(headcount.errors.map(({ page }) => page), ['b\u0000d']);
});

test('of many refused pages and counters each costs one error, since a connection has twenty', async () => {
  const headcount = client();
  for (let i = 0; i < 6; i++) {
    headcount.join(`private/${i}`);
    headcount.watch([`private/w${i}`, `open/w${i}`], () => {});
    headcount.counter(`private:${i}`).watch(() => {});
  }
  headcount.join('open');
  await settle();
  sockets[0].welcome();
  const taken = new Set();
  assert.equal(await serve(sockets[0], (topic) => topic.startsWith('private'), taken), 18);
  assert.deepEqual([...taken].sort(), ['open', ...[0, 1, 2, 3, 4, 5].map((i) => `open/w${i}`)]);
  assert.equal(headcount.errors.length, 18);
});

test('what was refused because it came too fast is sent again once, however many frames it was', async () => {
  const headcount = client();
  for (let i = 0; i < 30; i++) headcount.join(`p${i}`);
  await settle();
  sockets[0].welcome();
  sockets[0].take();
  for (let i = 0; i < 5; i++) sockets[0].say({ type: 'error', code: 'rate_limited', message: 'too many' });
  await tick(2_000);
  assert.deepEqual(sockets[0].take(), [{ type: 'heartbeat' }]);
  sockets[0].say({ type: 'heartbeat' });
  assert.equal(sockets[0].take().length, 30);
  await tick(10_000);
  assert.deepEqual(sockets[0].take(), []);
});

test('frames that make no sense are ignored', async () => {
  const headcount = await connected();
  for (const data of ['', '{', 'null', '7', '"x"', '[]', '{}', '{"type":"later"}', '{"type":"count"}'])
    sockets[0].dispatchEvent(new MessageEvent('message', { data }));
  sockets[0].dispatchEvent(new MessageEvent('message', { data: new ArrayBuffer(3) }));
  assert.equal(headcount.state, 'open');
});

test('unread goes to those who asked for it, and read is sent even if requested without a connection', async () => {
  const headcount = await connected();
  sockets[0].say({ type: 'unread', count: 3 });
  const seen = [];
  const stop = headcount.unread((n) => seen.push(n));
  await settle();
  sockets[0].say({ type: 'unread', count: 3 });
  sockets[0].say({ type: 'unread', count: 4 });
  assert.deepEqual(seen, [3, 4]);
  stop();
  sockets[0].take();
  sockets[0].drop();
  headcount.read();
  await tick(500);
  sockets[1].welcome();
  assert.deepEqual(sockets[1].take(), [{ type: 'join', page: 'p' }, { type: 'read' }]);
});

test('read is not lost to a connection that has ended after a refusal', async () => {
  const headcount = await connected();
  sockets[0].say({ type: 'error', code: 'rate_limited', message: 'too many' });
  Math.random.mock.mockImplementation(() => 1);
  sockets[0].drop();
  headcount.read();
  await tick(1_000);
  await tick(1_000); // now what was refused would be said again
  sockets[1].welcome();
  assert.deepEqual(sockets[1].take(), [{ type: 'join', page: 'p' }, { type: 'read' }]);
});

test('a page that the user leaves closes without a leave frame, and may come back from the cache', async () => {
  await connected();
  sockets[0].take();
  dispatchEvent(new Event('pagehide'));
  assert.equal(sockets[0].closed, true);
  assert.deepEqual(sockets[0].take(), []);
  await tick(60_000);
  assert.equal(sockets.length, 1);
  dispatchEvent(new Event('pageshow'));
  await settle();
  assert.equal(sockets.length, 2);
  sockets[1].welcome();
  assert.deepEqual(sockets[1].take(), [{ type: 'join', page: 'p' }]);
});

test('when the network comes back the client does not wait any longer, and checks an open connection', async () => {
  const headcount = await connected();
  sockets[0].take();
  dispatchEvent(new Event('online'));
  dispatchEvent(new Event('visibilitychange'));
  assert.deepEqual(sockets[0].take(), [{ type: 'heartbeat' }]);
  await tick(5_000);
  assert.equal(headcount.state, 'waiting');
  dispatchEvent(new Event('online'));
  await settle();
  assert.equal(sockets.length, 2);
  await tick(10_000);
  assert.equal(sockets.length, 2, 'and no second attempt beside it');
});

test('close leaves, until open', async () => {
  const headcount = await connected();
  sockets[0].take();
  headcount.close();
  headcount.close();
  assert.deepEqual(sockets[0].take(), [{ type: 'leave', page: 'p' }]);
  assert.equal(sockets[0].closed, true);
  assert.equal(headcount.state, 'closed');
  for (const type of ['online', 'pagehide', 'pageshow', 'focus']) dispatchEvent(new Event(type));
  headcount.join('q');
  headcount.token = 't';
  await tick(120_000);
  assert.equal(sockets.length, 1);
  headcount.open();
  headcount.open();
  await settle();
  assert.equal(sockets.length, 2);
  sockets[1].welcome();
  assert.deepEqual(sockets[1].take(), [{ type: 'join', page: 'p' }, { type: 'join', page: 'q' }]);
  assert.deepEqual(headcount.states.slice(-4), ['closed', 'idle', 'connecting', 'open']);
});

test('a script may close when its page goes, and open when it is back', async () => {
  const headcount = await connected();
  addEventListener('pagehide', () => headcount.close());
  addEventListener('pageshow', () => headcount.open());
  dispatchEvent(new Event('pagehide'));
  dispatchEvent(new Event('pageshow'));
  await settle();
  assert.equal(sockets.length, 2);
  sockets[1].welcome();
  assert.deepEqual(sockets[1].take(), [{ type: 'join', page: 'p' }]);
});

test('any sign that the page is here again wakes it', async () => {
  for (const type of ['pageshow', 'focus', 'visibilitychange', 'resume', 'online']) {
    document = Object.assign(new EventTarget(), { hidden: false });
    sockets.length = 0;
    const headcount = await connected();
    const signal = () => (type === 'resume' ? document : globalThis).dispatchEvent(new Event(type));
    document.hidden = true;
    dispatchEvent(new Event('visibilitychange'));
    await tick(5_000);
    assert.equal(sockets[0].take().at(-1).type, 'pause');
    document.hidden = false;
    signal();
    await settle();
    assert.ok(sockets[0].take().some((frame) => frame.type === 'resume'), `${type} ends the pause`);

    dispatchEvent(new Event('pagehide'));
    document.hidden = true;
    dispatchEvent(new Event('visibilitychange')); // as at the end of a page
    await settle();
    assert.equal(sockets.length, 1);
    document.hidden = false;
    signal();
    await settle();
    assert.equal(sockets.length, 2, `${type} ends an absence`);
    headcount.close();
  }
});

test('a page that the browser has made in advance counts nobody until it is opened', async () => {
  document = Object.assign(new EventTarget(), { hidden: true, prerendering: true });
  const headcount = client();
  headcount.join('p');
  await settle();
  for (const type of ['pageshow', 'visibilitychange']) dispatchEvent(new Event(type));
  await tick(60_000);
  assert.equal(sockets.length, 0);
  Object.assign(document, { hidden: false, prerendering: false });
  document.dispatchEvent(new Event('prerenderingchange'));
  await settle();
  assert.equal(sockets.length, 1);
  sockets[0].welcome();
  assert.deepEqual(sockets[0].take(), [{ type: 'join', page: 'p' }], 'and no pause');
});

test('a message over the connection of a page that can be seen ends its pause', async () => {
  await connected();
  document.hidden = true;
  dispatchEvent(new Event('visibilitychange'));
  await tick(5_000);
  sockets[0].take();
  document.hidden = false;
  sockets[0].say({ type: 'heartbeat' });
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'resume' }]);
});

test('when nothing is wanted any more a lost connection stays lost', async () => {
  const headcount = await connected();
  headcount.leave();
  await settle();
  sockets[0].drop();
  await tick(60_000);
  assert.equal(sockets.length, 1);
  assert.equal(headcount.state, 'idle');
  headcount.join('p');
  await settle();
  assert.equal(sockets.length, 2);
});

test('a connection of which nothing is wanted is closed after five seconds, and a new want opens another at once', async () => {
  const headcount = await connected();
  headcount.leave('p');
  await settle();
  await tick(4_900);
  const stop = headcount.unread(() => {});
  await settle();
  await tick(10_000);
  assert.equal(sockets[0].closed, false, 'it is wanted again');
  sockets[0].say({ type: 'unread', count: 3 });
  stop();
  await settle();
  await tick(4_900);
  assert.equal(sockets[0].closed, false, 'something may come back soon');
  await tick(100);
  assert.equal(sockets[0].closed, true);
  await tick(60_000);
  assert.equal(headcount.state, 'idle');
  assert.equal(sockets.length, 1);

  const seen = [];
  headcount.unread((count) => seen.push(count));
  await settle();
  assert.equal(sockets.length, 2);
  assert.deepEqual(seen, [], 'what was unread then may not be now');
  sockets[1].welcome();
  sockets[1].say({ type: 'unread', count: 1 });
  assert.deepEqual(seen, [1]);
});

test('a WebSocket that the browser refuses to make is a failed attempt', async () => {
  globalThis.WebSocket = class {
    constructor() {
      throw new DOMException('mixed content', 'SecurityError');
    }
  };
  const headcount = client();
  headcount.join('p');
  await settle();
  assert.deepEqual(headcount.errors, [{ code: 'connect', message: 'SecurityError: mixed content' }]);
  assert.equal(headcount.state, 'waiting');
});

test('a loop over counts gets the newest of each page, and ends with break or close', async () => {
  const headcount = await connected();
  const seen = [];
  const loop = (async () => {
    for await (const { page, count } of headcount.watch(['p', 'q'])) {
      seen.push(`${page} ${count}`);
      if (count === 9) break;
      await settle();
    }
  })();
  await settle();
  sockets[0].take();
  for (const n of [1, 2, 3]) sockets[0].say(count('p', n, `17-${n}`));
  sockets[0].say(count('q', 5, '17-5'));
  for (let i = 0; i < 4; i++) await settle();
  sockets[0].say(count('q', 9, '17-6'));
  await loop;
  assert.deepEqual(seen, ['p 3', 'q 5', 'q 9']);
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'unsubscribe', pages: ['q'] }], 'nobody watches it any more');

  const unread = (async () => {
    const numbers = [];
    for await (const n of headcount.unread()) numbers.push(n);
    return numbers;
  })();
  await settle();
  sockets[0].say({ type: 'unread', count: 2 });
  await settle();
  headcount.close();
  assert.deepEqual(await unread, [2, 0], 'whoever closes it may have logged out');

  const other = await connected();
  const one = (async () => {
    for await (const { count } of other.watch('p')) other.close(count);
  })();
  await settle();
  sockets[1].say(count('p', 1, '17-1'));
  await one; // it ends although the loop did not wait when it was closed
});

test('a tab that was hidden for a minute is not counted, if the site says so', async () => {
  const headcount = await connected({ countHidden: false });
  const hide = async (yes) => {
    document.hidden = yes;
    dispatchEvent(new Event('visibilitychange'));
    await settle();
    sockets[0].say({ type: 'heartbeat' });
  };
  const alive = async (ms) => {
    for (; ms > 0; ms -= 5_000) {
      await tick(Math.min(ms, 5_000));
      sockets[0].say({ type: 'heartbeat' });
    }
  };
  sockets[0].take();
  await hide(true);
  await alive(59_000);
  await hide(false);
  await alive(30_000);
  await hide(true);
  await alive(59_000);
  const counted = () => sockets[0].take().filter((f) => !['heartbeat', 'pause', 'resume'].includes(f.type));
  assert.deepEqual(counted(), []);
  await alive(1_000);
  assert.deepEqual(counted(), [{ type: 'subscribe', pages: ['p'] }, { type: 'leave', page: 'p' }]);
  headcount.join('q');
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'subscribe', pages: ['q'] }], 'nor on another page');
  await hide(false);
  assert.deepEqual(counted(), [{ type: 'join', page: 'p' }, { type: 'join', page: 'q' }]);
  await hide(true);
  await alive(60_000);
  counted();
  headcount.countHidden = false; // as an element that is drawn while nobody sees it
  await alive(30_000);
  assert.deepEqual(counted(), [], 'the tab is hidden all the while');
  await hide(false);
  counted();
  await hide(true);
  headcount.countHidden = true;
  await alive(120_000);
  assert.deepEqual(counted(), []);
});

test('a tab that was hidden for five seconds gets no counts until it is seen again', async () => {
  const headcount = await connected();
  const unread = [];
  headcount.unread((n) => unread.push(n));
  const hide = (yes) => {
    document.hidden = yes;
    dispatchEvent(new Event('visibilitychange'));
    sockets.at(-1).say({ type: 'heartbeat' });
    return settle();
  };
  const paces = () => sockets.at(-1).take().filter((f) => f.type !== 'heartbeat');
  paces();
  await hide(true);
  await tick(4_999);
  await hide(false);
  assert.deepEqual(paces(), [], 'a glance at another tab is no pause');
  await hide(true);
  await tick(5_000);
  assert.deepEqual(paces(), [{ type: 'pause' }]);
  sockets[0].say({ type: 'unread', count: 3 });
  assert.deepEqual(unread, [3]);
  headcount.join('q');
  await settle();
  assert.deepEqual(paces(), [{ type: 'join', page: 'q' }], 'the user is here all the same');
  sockets[0].drop();
  await tick(500);
  sockets[1].welcome();
  assert.deepEqual(paces()[0], { type: 'pause' }, 'a new connection brings none either, not even the first ones');
  await hide(false);
  assert.deepEqual(paces(), [{ type: 'resume' }]);
});

const lasting = (key, value, version, more) => ({
  type: 'counter', key, kind: 'members', value, updated_at: null, version, exact: true, ...more,
});

test('counters that last share the connection, and their newest values come once each', async () => {
  const headcount = await connected();
  sockets[0].take();
  const likes = headcount.counter('likes:42');
  assert.deepEqual(sockets[0].take(), [], 'nothing looks at it yet');
  const seen = [];
  const stop = likes.watch(({ value, mine = false }) => seen.push(`${value} ${mine}`));
  headcount.watch('q', () => {});
  await settle();
  assert.deepEqual(sockets[0].take(), [
    { type: 'subscribe', pages: ['q'] },
    { type: 'subscribe', counters: ['likes:42'] },
  ]);
  assert.equal(likes.value, undefined);
  sockets[0].say(lasting('likes:42', 2, '17-2'));
  sockets[0].say(lasting('likes:42', 2, '17-2'));
  sockets[0].say(lasting('likes:42', 1, '17-1'));
  sockets[0].say(count('likes:42', 7, '18-1')); // a page of that name is something else
  assert.deepEqual(seen, ['2 false']);
  assert.equal(likes.value, 2);
  sockets[0].say(lasting('likes:42', 2, '17-2', { mine: true }));
  sockets[0].say(lasting('likes:42', 0, '0-0')); // deleted
  sockets[0].say(lasting('likes:42', 1, '18-1'));
  assert.deepEqual(seen.slice(1), ['2 true', '0 false', '1 false']);
  stop();
  await settle();
  assert.deepEqual(sockets[0].take(), [{ type: 'unsubscribe', counters: ['likes:42'] }]);
  assert.equal(likes.value, undefined);
});

test('a counter that the server refuses is dropped, and the rest is said again', async () => {
  const headcount = await connected();
  const seen = [];
  for (const key of ['likes:1', 'stock:1']) headcount.counter(key).watch((counter) => seen.push(counter.key));
  await settle();
  sockets[0].take();
  sockets[0].say({ type: 'error', code: 'forbidden', message: 'not public', counter: 'stock:1' });
  await tick(0);
  assert.deepEqual(sockets[0].take(), [{ type: 'heartbeat' }]);
  sockets[0].say({ type: 'heartbeat' });
  assert.deepEqual(sockets[0].take(), [{ type: 'join', page: 'p' }, { type: 'subscribe', counters: ['likes:1'] }]);
  assert.deepEqual(headcount.errors, [{ code: 'forbidden', message: 'not public', counter: 'stock:1' }]);
  sockets[0].say(lasting('stock:1', 1, '1-1'));
  sockets[0].say(lasting('likes:1', 1, '1-1'));
  assert.deepEqual(seen, ['likes:1']);
  assert.throws(() => headcount.counter('').watch(() => {}), TypeError);
  for (let i = 0; i < 98; i++) headcount.counter(`views:${i}`).watch(() => {});
  assert.throws(() => headcount.counter('one more').watch(() => {}), RangeError, 'pages and counters together');
});

test('what a user may not see is asked for again when another one has logged in', async () => {
  mock.method(console, 'error', () => {});
  const headcount = await connected();
  const [seen, refused] = [[], []];
  headcount.here((counter) => seen.push(counter?.count), { page: 'team/1' });
  await settle();
  const { signal } = new AbortController();
  const parts = {
    element: { localName: 'live-counter', getAttribute: (name) => (name === 'counter' ? 'pay:1' : null) },
    show: (value) => seen.push(value),
    forget: () => refused.push('not any more'),
    refuse: (why) => refused.push(why),
  };
  draw({ ...parts, headcount, signal });
  await settle();
  sockets[0].say({ type: 'error', code: 'forbidden', message: 'private', page: 'team/1' });
  sockets[0].say({ type: 'error', code: 'forbidden', message: 'private', counter: 'pay:1' });
  await settle();
  sockets[0].take();

  headcount.token = tokenOf('ann');
  await settle();
  sockets[1].welcome({ id: undefined });
  assert.deepEqual(sockets[1].take(), [
    { type: 'join', page: 'p' },
    { type: 'join', page: 'team/1' },
    { type: 'subscribe', counters: ['pay:1'] },
  ]);
  sockets[1].say(count('team/1', 2, '1-1'));
  sockets[1].say(lasting('pay:1', 7, '1-1'));
  assert.deepEqual(seen, [undefined, undefined, 2, 7]);
  assert.deepEqual(refused, ['pay:1: private', 'not any more']);
});

test('a change says who the user is, and its answer is heard at once', async () => {
  const asked = [];
  let answer = () =>
    Response.json(
      { ...lasting('likes:a/b', 5, '17-5'), type: undefined, member: true },
      { headers: { 'Headcount-Id': signed('v') } },
    );
  globalThis.fetch = async (url, { method, headers }) => {
    asked.push(`${method} ${url} ${JSON.stringify(headers)}`);
    return answer();
  };
  const url = 'https://changed.example';
  const headcount = client({}, url);
  const likes = headcount.counter('likes:a/b');
  const seen = [];
  likes.watch(({ value, mine = false }) => seen.push(`${value} ${mine}`));
  await settle();
  sockets[0].welcome();
  assert.equal((await likes.add()).value, 5);
  assert.deepEqual(seen, ['5 true']);
  assert.equal(storage[`headcount_id ${url}`], signed('v'), 'who was issued an identity keeps it');
  await likes.remove();
  headcount.token = async () => 't';
  await headcount.counter('votes:1').increment();
  assert.deepEqual(asked, [
    `PUT ${url}/api/v1/counters/likes%3Aa%2Fb/members/me {"Headcount-Id":"${signed('u')}"}`,
    `DELETE ${url}/api/v1/counters/likes%3Aa%2Fb/members/me {"Headcount-Id":"${signed('v')}"}`,
    `POST ${url}/api/v1/counters/votes%3A1/increment {"Authorization":"Bearer t"}`,
  ]);

  for (const [status, detail] of [[403, 'not public'], [429, 'later']]) {
    answer = () => Response.json({ detail }, { status });
    await assert.rejects(likes.add(), { status, message: detail });
  }
  answer = () => new Response('<html>', { status: 502 });
  await assert.rejects(likes.add(), { status: 502 });
  answer = () => Promise.reject(new TypeError('no network'));
  await assert.rejects(likes.add(), { message: 'no network' });
  assert.deepEqual(seen.slice(0, 2), ['5 true', '5 false'], 'of the user with the token nothing is known yet');
});

test('the answer to a change of the user before is not taken for one of this user', async () => {
  let answer;
  globalThis.fetch = () => new Promise((resolve) => (answer = resolve));
  const headcount = await connected({ token: tokenOf('ann') });
  const likes = headcount.counter('likes:1');
  const seen = [];
  likes.watch(({ value, mine = false }) => seen.push(`${value} ${mine}`));
  await settle();
  sockets[0].say(lasting('likes:1', 1, '1-1'));
  const added = likes.add();
  await settle();
  headcount.token = tokenOf('bob');
  await settle();
  sockets[1].welcome({ id: undefined });
  sockets[1].say(lasting('likes:1', 2, '1-2'));
  answer(Response.json({ ...lasting('likes:1', 2, '1-2'), member: true }));
  assert.equal((await added).mine, true, 'whoever asked gets it');
  assert.deepEqual(seen, ['1 false', '2 false']);
});

test('the log-in page of a proxy is not taken for an answer, and what a user follows is asked for again', async () => {
  const logIn = () => new Response('<!doctype html><title>Log in</title>', { headers: { 'Content-Type': 'text/html' } });
  let answer = logIn;
  globalThis.fetch = async () => answer();
  const headcount = await connected();
  const follows = [];
  headcount.addEventListener('follow', ({ detail }) => follows.push(detail));
  const likes = headcount.counter('likes:1');
  for (const call of [() => likes.add(), () => headcount.follow('p'), () => headcount.follows()])
    await assert.rejects(call, { name: 'Error', message: /no Headcount server.*log-in/ });
  assert.deepEqual(follows, []);

  const [seen, complaints] = [[], []];
  const end = new AbortController();
  followed(headcount, 'p', (yes) => seen.push(yes), ({ message }) => complaints.push(message), end.signal);
  await settle();
  answer = () => Response.json({ follows: ['p'] });
  for (let i = 0; i < 3; i++) {
    sockets[0].say({ type: 'heartbeat' });
    await tick(10_000);
  }
  assert.deepEqual([complaints.length, seen], [1, [true]]);
  answer = () => new Response(null, { status: 204 });
  await headcount.unfollow('p');
  assert.deepEqual(follows, [{ page: 'p', followed: false }]);
  end.abort();
});

test('what a user has clicked is done as this user or not at all, whoever has logged in since', async () => {
  const done = [];
  globalThis.fetch = async (url, { method, headers }) => {
    const { sub } = JSON.parse(atob(headers.Authorization.split('.')[1]));
    done.push(`${sub} ${method} ${new URL(url).pathname.split('/').at(-1)}`);
    return Response.json({ ...lasting('likes:1', 1, '1-1'), follows: [] });
  };
  const headcount = await connected({ token: tokenOf('ann') });
  const likes = headcount.counter('likes:1');
  // The file that makes the calls is loaded at the first click, and the log-in may be faster.
  const clicks = [likes.add(), headcount.follow('p')];
  headcount.token = tokenOf('bob');
  await Promise.all([...clicks, likes.remove(), headcount.unfollow('p')]);
  assert.deepEqual(done.splice(0), ['ann PUT me', 'ann PUT p', 'bob DELETE me', 'bob DELETE p']);

  // A session is asked for the token, and its answer comes after the next log-in, of which nobody has told this tab.
  let session = Promise.resolve(tokenOf('bob'));
  headcount.token = () => session;
  await settle();
  let answer;
  session = new Promise((resolve) => (answer = resolve));
  const late = [likes.add(), headcount.follow('p'), headcount.follows()];
  answer(tokenOf('cy'));
  for (const call of late) await assert.rejects(call, { message: 'Headcount: another user' });
  assert.deepEqual(done, []);
  await settle();
  assert.equal(sockets.at(-1).url.searchParams.get('token'), tokenOf('cy'), 'and from now on this is the user');
  await likes.add();
  assert.deepEqual(done, ['cy PUT me']);
});

test('what a user follows is asked for again while the server cannot say it', async () => {
  let answer = () => Response.json({ detail: 'the store is away' }, { status: 503 });
  let asked = 0;
  globalThis.fetch = async () => {
    asked++;
    return answer();
  };
  const headcount = await connected();
  const [seen, complaints] = [[], []];
  const end = new AbortController();
  followed(headcount, 'p', (yes) => seen.push(yes), ({ message }) => complaints.push(message), end.signal);
  await settle();
  const wait = async () => {
    for (let i = 0; i < 3; i++) {
      sockets[0].say({ type: 'heartbeat' });
      await tick(10_000);
    }
  };
  await wait();
  assert.deepEqual([asked, seen, complaints], [2, [], ['the store is away', 'the store is away']]);
  answer = () => Response.json({ follows: ['p'] });
  await wait();
  assert.deepEqual([asked, seen], [3, [true]]);
  await wait();
  assert.equal(asked, 3);

  answer = () => Response.json({ detail: 'who are you?' }, { status: 401 });
  followed(headcount, 'q', assert.fail, () => {}, end.signal);
  await wait();
  assert.equal(asked, 4, 'the answer would be the same');
  end.abort();
});

test('what the user before follows is not taken for what this user follows', async () => {
  const answers = [];
  globalThis.fetch = (_, { method }) =>
    new Promise((resolve) =>
      answers.push((follows) =>
        resolve(method === 'GET' ? Response.json({ follows }) : new Response(null, { status: 204 })),
      ),
    );
  const headcount = await connected({ token: tokenOf('ann') });
  const seen = [];
  followed(headcount, 'p', (yes) => seen.push(yes), assert.fail, new AbortController().signal);
  await settle();
  const following = headcount.follow('p');
  await settle();
  headcount.token = tokenOf('bob');
  await settle();
  sockets[1].welcome({ id: undefined });
  await settle();
  assert.equal(answers.length, 3);
  answers[2]([]);
  answers[0](['p']);
  answers[1]();
  await following;
  await settle();
  assert.deepEqual(seen, [undefined, false], 'after the log-in, and as the server says of this user');
});

test('a second click that waits for the answer to the first is not made as the next user', async () => {
  const asked = [];
  globalThis.fetch = (_, { method, headers }) =>
    new Promise((resolve) => {
      const answer = () => resolve(Response.json({ ...lasting('likes:1', 1, '1-1'), member: method === 'PUT' }));
      asked.push({ who: headers.Authorization.split(' ')[1], method, answer });
    });
  const headcount = await connected({ token: tokenOf('ann') });
  const button = Object.assign(new EventTarget(), {
    pressed: [],
    setAttribute: (name, value) => name === 'aria-pressed' && button.pressed.push(value),
    part: { toggle() {} },
  });
  const element = { localName: 'like-button', getAttribute: (name) => (name === 'counter' ? 'likes:1' : null) };
  const number = { closest: () => button, textContent: '1' };
  draw({ element, headcount, number, show() {}, signal: new AbortController().signal });
  await settle();
  sockets[0].say(lasting('likes:1', 0, '1-0'));
  for (const _ of ['a like', 'and not']) button.dispatchEvent(new Event('click'));
  await settle();
  headcount.token = tokenOf('bob');
  await settle();
  sockets[1].welcome({ id: undefined });
  sockets[1].say(lasting('likes:1', 2, '1-2', { mine: true }));
  asked[0].answer();
  await settle();
  assert.deepEqual(asked.map(({ who, method }) => `${method} ${who === tokenOf('ann') ? 'ann' : 'bob'}`), ['PUT ann']);
  assert.equal(button.pressed.at(-1), 'true', 'bob likes it');
});

test('a page that the server refuses has a state of its own, until the server greets it', async () => {
  const told = mock.method(console, 'error', () => {});
  globalThis.fetch = async (url, { method }) =>
    method === 'PUT'
      ? new Response(JSON.stringify({ detail: 'no' }), { status: 403 })
      : new Response('{"counters":[]}');
  const headcount = client({}, 'https://refusing.example');
  headcount.join('p');
  await settle();
  sockets[0].drop();
  assert.equal(headcount.state, 'waiting');
  await tick(500);
  await tick(0);
  assert.equal(headcount.state, 'refused');
  assert.deepEqual(headcount.errors, [{ code: 'refused', message: 'https://refusing.example/ refuses this page: no' }]);
  sockets[1].drop();
  await tick(1_000);
  assert.deepEqual(
    headcount.states,
    ['connecting', 'waiting', 'connecting', 'refused'],
    'further attempts are not seen',
  );
  assert.equal(headcount.errors.length, 1);
  assert.deepEqual(
    told.mock.calls.map(({ arguments: [text] }) => text),
    ['Headcount: https://refusing.example/ refuses this page: no'],
    'once',
  );
  assert.equal(sockets.length, 3, 'and go on');
  sockets[2].open();
  assert.equal(headcount.state, 'refused', 'an open socket is no welcome');
  sockets[2].say({ type: 'welcome', user: 'u', heartbeat_ms: 15_000 });
  assert.equal(headcount.state, 'open');
});

test('a page that is refused asks seldom after some attempts, since the console has lines of each', async () => {
  mock.method(console, 'error', () => {});
  globalThis.fetch = async (_, { method }) => new Response('{"counters":[]}', { status: method === 'PUT' ? 401 : 200 });
  client({}, 'https://seldom.example').join('p');
  for (let i = 0; i < 60; i++) {
    await settle();
    sockets.at(-1).drop();
    await tick(1_000);
  }
  assert.ok(sockets.length >= 6 && sockets.length <= 12, `${sockets.length} attempts in a minute`);
});

test('without storage there is an id for the life of the document, and nothing is shared or kept', async () => {
  const headcount = client({ storage: 'none' }, 'https://nothing.example');
  headcount.join('p');
  await settle();
  assert.match(sockets[0].url.search, /^\?id=0{22}\.\w{22}&storage=none$/);
  sockets[0].welcome({ id: signed('tab') });
  assert.deepEqual(storage, {});
  sockets[0].drop();
  await tick(500);
  assert.deepEqual([...sockets[1].url.searchParams].map(([name]) => name), ['id', 'storage', 'back']);
  client({}, 'https://nothing.example').join('p');
  await settle();
  assert.equal(sockets[2].url.search, `?id=${signed('tab')}`, 'who consents to storage stays who they were');
  assert.deepEqual(storage, { 'headcount_id https://nothing.example': signed('tab') });

  globalThis.location = new URL('https://own.example/');
  client({ server: 'https://own.example', storage: 'none' }).join('p');
  await settle();
  assert.match(sockets[3].url.search, /^\?id=0{22}\.\w{22}&storage=none$/, 'on the own origin, too');
  assert.equal(document.cookie, undefined);
});

test('the options may come alone, and those for all at once', async () => {
  const at = async (...all) => {
    const made = new Headcount(...all);
    clients.push(made);
    made.join('p');
    await settle();
    return sockets.at(-1).url.href.replace(/id=0[^&]*&?/, '').replace(/\?$/, '');
  };
  assert.equal(await at({ server: 'https://a.example' }), 'wss://a.example/-/ws');
  Headcount.defaults = { server: 'https://b.example', storage: 'none' };
  assert.equal(await at(), 'wss://b.example/-/ws?storage=none');
  assert.equal(await at(undefined, { token: 't' }), 'wss://b.example/-/ws?token=t&storage=none');
  assert.equal(await at('https://c.example'), 'wss://c.example/-/ws?storage=none');
  const shared = Headcount.at({ server: 'https://d.example' });
  clients.push(shared, Headcount.shared);
  assert.equal(Headcount.at({ server: 'https://d.example' }), shared);
  assert.notEqual(Headcount.shared, shared);
  assert.equal(Headcount.at(), Headcount.shared);
  Headcount.defaults = {};
});

// What the client finds out, and says, when it cannot open a WebSocket.
import assert from 'node:assert/strict';
import { afterEach, beforeEach, mock, test } from 'node:test';

const ADDRESS = new URL('wss://count.example/-/ws');
const counters = { status: 200, body: { counters: [] } };
let asked;
let answers; // by method and path; none is a network that fails, or a server that does not allow this origin
let said;
let number = 0;

/** A rescue that has told nothing yet. */
const fresh = async () => {
  const { default: rescue } = await import(`../rescue.js?test${++number}`);
  const owner = {};
  return (address, failures, refusal) => rescue(address, failures, refusal, owner);
};

beforeEach(() => {
  asked = [];
  said = [];
  answers = {};
  globalThis.location = new URL('https://site.example/path');
  Object.defineProperty(globalThis, 'navigator', { value: { onLine: true }, configurable: true });
  globalThis.fetch = async (url, { method = 'GET', credentials }) => {
    const call = `${method} ${url.pathname}`;
    asked.push(`${call} ${credentials}`);
    const answer = answers[call];
    if (!answer) throw new TypeError('no network');
    return new Response(typeof answer.body === 'string' ? answer.body : JSON.stringify(answer.body), {
      status: answer.status,
    });
  };
  for (const how of ['error', 'warn']) mock.method(console, how, (text) => said.push(`${how} ${text}`));
});

afterEach(() => {
  mock.restoreAll();
  delete globalThis.origin;
});

test('there is a replacement once a WebSocket failed while the server answered', async () => {
  const rescue = await fresh();
  answers = {
    'GET /-/counters': counters,
    'GET /*/counter/events': { status: 200, body: '' },
    'PUT /-/me/unread': { status: 400, body: { detail: 'reserved' } },
  };
  assert.equal(await rescue(ADDRESS, 1), undefined, 'the server may be back just now');
  assert.equal(typeof (await rescue(ADDRESS, 2)), 'function');
  assert.deepEqual(
    asked.map((call) => call.split(' ')[0]),
    ['GET', 'PUT', 'GET', 'GET', 'GET'],
    'who may write is asked once',
  );
  assert.equal(await rescue(ADDRESS, 3), undefined);
  assert.deepEqual(said, []);
});

test('a proxy that keeps events back, and their status too, has a replacement as well', async () => {
  const rescue = await fresh();
  answers = { 'GET /-/counters': counters, 'PUT /-/me/unread': { status: 400, body: {} } };
  const { fetch } = globalThis;
  globalThis.fetch = (url, options) =>
    url.pathname === '/*/counter/events' ? new Promise(() => {}) : fetch(url, options);
  mock.timers.enable({ apis: ['setTimeout'] });
  for (const found of ['undefined', 'function']) {
    const finding = rescue(ADDRESS, found === 'function' ? 2 : 1);
    for (let i = 0; i < 20; i++) await Promise.resolve();
    mock.timers.tick(5_000);
    assert.equal(typeof (await finding), found);
  }
  mock.timers.reset();
});

test('a clock that was set back does not make WebSockets blocked for as long', async () => {
  const rescue = await fresh();
  globalThis.localStorage = { 'headcount_blocked https://count.example': Date.now() + 3_600_000 };
  assert.equal(await rescue(ADDRESS, 1), null);
  globalThis.localStorage = { 'headcount_blocked https://count.example': Date.now() - 1000 };
  assert.equal(typeof (await rescue(ADDRESS, 1)), 'function');
  delete globalThis.localStorage;
});

test('the replacement waits for no answer for ever, since a browser has few connections to a server', async () => {
  const rescue = await fresh();
  answers = {
    'GET /-/counters': counters,
    'GET /*/counter/events': { status: 200, body: '' },
    'PUT /-/me/unread': { status: 400, body: {} },
  };
  await rescue(ADDRESS, 1);
  const Replacement = await rescue(ADDRESS, 2);
  const limit = new AbortController();
  mock.method(AbortSignal, 'timeout', () => limit.signal);
  globalThis.fetch = (_, { signal }) => new Promise((_, fail) => signal?.addEventListener('abort', fail));
  const replacement = new Replacement(ADDRESS.href);
  let closed = false;
  replacement.addEventListener('close', () => (closed = true));
  limit.abort();
  await new Promise(setImmediate);
  replacement.close();
  assert.ok(closed);
});

test('tabs that cannot share a connection leave some for the site, and the hidden ones have none', async () => {
  const open = new Set();
  globalThis.EventSource = class extends EventTarget {
    constructor(url) {
      super();
      this.url = url;
      open.add(this);
    }
    close() {
      open.delete(this);
    }
  };
  globalThis.localStorage = {};
  const put = [];
  globalThis.fetch = async (url, { method = 'GET', body, signal } = {}) => {
    if (method === 'PUT' && body?.includes('action')) put.push(JSON.parse(body).action);
    if (url.pathname.endsWith('/events')) return new Response('');
    return Response.json(
      url.pathname === '/-/me/unread' ? { count: 0 } : { counters: [], page: 'p', count: 1, version: '1-1' },
      { status: method === 'PUT' && body === '{}' ? 400 : 200, signal },
    );
  };
  const settle = async () => {
    for (let i = 0; i < 20; i++) await new Promise(setImmediate);
  };
  mock.timers.enable({ apis: ['setTimeout', 'setInterval', 'Date'], now: 1e12 });
  const tabs = [];
  try {
    for (let i = 0; i < 5; i++) {
      globalThis.document = Object.assign(new EventTarget(), { hidden: false });
      const rescue = await fresh();
      delete localStorage['headcount_blocked https://count.example'];
      await rescue(ADDRESS, 1);
      const tab = new (await rescue(ADDRESS, 2))(ADDRESS.href);
      tab.page = globalThis.document;
      tabs.push(tab);
      tab.send('{"type":"join","page":"p"}');
      tab.send('{"type":"subscribe","pages":["q"]}');
      await settle();
    }
    assert.equal(open.size, 3, 'one each, and no more than three');
    assert.ok([...open].every(({ url }) => url.searchParams.get('join') === '1'), 'of the page where the user is');

    [...open][0].dispatchEvent(new MessageEvent('join', { data: '{"heartbeat_ms":15000}' }));
    await settle();
    put.length = 0;
    globalThis.document = tabs[0].page;
    document.hidden = true;
    document.dispatchEvent(new Event('visibilitychange'));
    await settle();
    assert.equal(open.size, 2, 'a hidden tab has none');
    assert.deepEqual(put, ['increment'], 'and its user stays');
  } finally {
    tabs.forEach((tab) => tab.close());
    mock.timers.reset();
    for (const name of ['EventSource', 'localStorage', 'document']) delete globalThis[name];
  }
});

test('counts of a joined page are stale until the server has counted the user', async () => {
  globalThis.EventSource = class extends EventTarget {
    close() {}
  };
  let away = false;
  globalThis.fetch = async (url, { method = 'GET', body } = {}) => {
    if (url.pathname.endsWith('/events')) return new Response('');
    if (url.pathname === '/-/me/unread') return Response.json({ count: 0 }, { status: body === '{}' ? 400 : 200 });
    if (method === 'PUT')
      return Response.json(away ? { title: 'try again' } : { page: 'p', count: 8 }, { status: away ? 503 : 200 });
    return Response.json({ counters: [{ page: 'p', count: 7 }] });
  };
  const settle = async () => {
    for (let i = 0; i < 20; i++) await new Promise(setImmediate);
  };
  const rescue = await fresh();
  await rescue(ADDRESS, 1);
  const replacement = new (await rescue(ADDRESS, 2))(ADDRESS.href);
  const counts = [];
  replacement.addEventListener('message', ({ data }) => {
    const { type, count, stale = false } = JSON.parse(data);
    if (type === 'count') counts.push(`${count} ${stale}`);
  });
  mock.timers.enable({ apis: ['setInterval'] });
  try {
    replacement.send('{"type":"subscribe","pages":["p"]}');
    await settle();
    away = true;
    replacement.send('{"type":"join","page":"p"}');
    await settle();
    replacement.send('{"type":"subscribe","pages":["p"]}');
    await settle();
    away = false;
    replacement.send('{"type":"leave","page":"p"}');
    replacement.send('{"type":"join","page":"p"}');
    await settle();
    replacement.send('{"type":"subscribe","pages":["p"]}');
    await settle();
    // The third is the answer to the leave, which comes when the page is joined again.
    assert.deepEqual(counts, ['7 false', '7 true', '8 true', '8 false', '7 false']);
  } finally {
    replacement.close();
    mock.timers.reset();
    delete globalThis.EventSource;
  }
});

test('a query for many long names is as many as a proxy takes, which refuses addresses of 8 KB', async () => {
  globalThis.EventSource = class extends EventTarget {
    close() {}
  };
  const longest = [];
  globalThis.fetch = async (url, { body } = {}) => {
    if (url.pathname.endsWith('/events')) return new Response('');
    if (url.pathname === '/-/me/unread') return Response.json({ count: 0 }, { status: body === '{}' ? 400 : 200 });
    if (`${url}`.length > 8_000) return new Response('<h1>Request-URI Too Large</h1>', { status: 414 });
    longest.push(`${url}`.length);
    if (url.pathname.startsWith('/api/v1/counters/')) return Response.json(last(decodeURIComponent(url.pathname)));
    const [pages, keys] = ['page', 'key'].map((name) => url.searchParams.getAll(name));
    return Response.json({ counters: [...pages.map((page) => ({ page, count: 1 })), ...keys.map(last)] });
  };
  const last = (name) => ({ key: name.split('/').at(-1), kind: 'sum', value: 1, version: '1-1' });
  const settle = async () => {
    for (let i = 0; i < 300; i++) await new Promise(setImmediate);
  };
  const rescue = await fresh();
  await rescue(ADDRESS, 1);
  mock.timers.enable({ apis: ['setInterval'] });
  const replacement = new (await rescue(ADDRESS, 2))(ADDRESS.href);
  let closed = false;
  replacement.addEventListener('close', () => (closed = true));
  const heard = new Set();
  replacement.addEventListener('message', ({ data }) => {
    const { page, key } = JSON.parse(data);
    heard.add(page ?? key);
  });
  try {
    // 128 characters of Japanese are 1,152 in an address. The client subscribes seven at a time.
    const pages = Array.from({ length: 49 }, (_, i) => `${'日'.repeat(126)}${10 + i}`);
    const counters = Array.from({ length: 49 }, (_, i) => `${'k'.repeat(126)}${10 + i}`);
    for (let i = 0; i < 49; i += 7) {
      const frame = { type: 'subscribe', pages: pages.slice(i, i + 7), counters: counters.slice(i, i + 7) };
      replacement.send(JSON.stringify(frame));
    }
    await settle();
    assert.equal([...pages, ...counters].filter((name) => heard.has(name)).length, 98, 'at first');
    heard.clear();
    mock.timers.tick(3_000);
    await settle();
    assert.equal([...pages, ...counters].filter((name) => heard.has(name)).length, 98, 'when they are polled');
    assert.ok(Math.max(...longest) > 2_000, 'names that fit together are asked for together');
    assert.ok(!closed);
  } finally {
    replacement.close();
    mock.timers.reset();
    delete globalThis.EventSource;
  }
});

test('when the token of a hold has expired the client asks for another one', async () => {
  globalThis.EventSource = class extends EventTarget {
    close() {}
  };
  let expired = false;
  globalThis.fetch = async (url, { method = 'GET', body } = {}) => {
    if (url.pathname.endsWith('/events')) return new Response('');
    if (url.pathname === '/-/me/unread') return Response.json({ count: 0 }, { status: body === '{}' ? 400 : 200 });
    if (method === 'PUT') return Response.json({ page: 'p', count: 1 }, { status: expired ? 401 : 200 });
    return Response.json({ counters: [{ page: 'p', count: 1 }] });
  };
  const settle = async () => {
    for (let i = 0; i < 20; i++) await new Promise(setImmediate);
  };
  const rescue = await fresh();
  await rescue(ADDRESS, 1);
  const Replacement = await rescue(ADDRESS, 2);
  mock.timers.enable({ apis: ['setInterval'] });
  const replacement = new Replacement(`${ADDRESS.href}?token=t`);
  let closed = 0;
  replacement.addEventListener('close', () => closed++);
  try {
    replacement.send('{"type":"join","page":"p"}');
    await settle();
    mock.timers.tick(7_000);
    await settle();
    assert.equal(closed, 0);
    expired = true;
    mock.timers.tick(7_000);
    await settle();
    assert.equal(closed, 1);
  } finally {
    replacement.close();
    mock.timers.reset();
    delete globalThis.EventSource;
  }
});

test('what one connection has found out says nothing of another', async () => {
  const { default: rescue } = await import('../rescue.js');
  answers = { 'GET /-/counters': counters, 'GET /*/counter/events': { status: 200, body: '' } };
  assert.equal(await rescue(ADDRESS, 2, '', {}), undefined);
  assert.equal(await rescue(ADDRESS, 2, '', {}), undefined);
});

test('a server that is restarted is no server behind a proxy that blocks WebSockets', async () => {
  const rescue = await fresh();
  const up = {
    'GET /-/counters': counters,
    'GET /*/counter/events': { status: 200, body: '' },
    'PUT /-/me/unread': { status: 400, body: {} },
  };
  for (let failures = 1; failures < 6; failures++) assert.equal(await rescue(ADDRESS, failures), null);
  answers = up;
  assert.equal(await rescue(ADDRESS, 6), undefined, 'a WebSocket is tried first');
  answers = {};
  assert.equal(await rescue(ADDRESS, 7), null, 'it failed since the server was away again');
  answers = up;
  assert.equal(await rescue(ADDRESS, 8), undefined);
  assert.equal(await rescue(ADDRESS, 1), undefined, 'a socket was welcome meanwhile: this is another row of failures');
  answers = { ...up, 'GET /*/counter/events': { status: 503, body: '' } };
  assert.equal(await rescue(ADDRESS, 2), null, 'it drains: it answers, and takes no connections');
  answers = up;
  assert.equal(await rescue(ADDRESS, 3), undefined);
  assert.equal(typeof (await rescue(ADDRESS, 4)), 'function');
});

test('a server that cannot verify tokens now is no server behind a proxy that blocks WebSockets', async () => {
  const rescue = await fresh();
  const { fetch } = globalThis;
  answers = {
    'GET /-/counters': counters,
    'GET /*/counter/events': { status: 401, body: '' },
    'PUT /-/me/unread': { status: 503, body: {} },
  };
  globalThis.fetch = async (url, options) =>
    url.searchParams.get('token') === 'a+b' ? new Response('', { status: 503 }) : fetch(url, options);
  for (let failures = 1; failures < 4; failures++)
    assert.equal(await rescue(new URL('?token=a%2Bb', ADDRESS), failures), null);
});

test('the console names the directive of a Content-Security-Policy that forbids WebSockets', async () => {
  const page = new EventTarget();
  globalThis.document = page;
  const rescue = await fresh();
  delete globalThis.document;
  answers = {
    'GET /-/counters': counters,
    'GET /*/counter/events': { status: 200, body: '' },
    'PUT /-/me/unread': { status: 400, body: {} },
  };
  await rescue(ADDRESS, 1);
  page.dispatchEvent(
    Object.assign(new Event('securitypolicyviolation'), {
      effectiveDirective: 'connect-src',
      blockedURI: 'wss://count.example/-/ws',
    }),
  );
  assert.equal(typeof (await rescue(ADDRESS, 2)), 'function');
  assert.equal(said.length, 1);
  assert.match(said[0], /^warn .*add wss:\/\/count.example to its connect-src/);
});

test('who is refused is told why, in the words of the server', async () => {
  const rescue = await fresh();
  answers = {
    'GET /-/counters': counters,
    'GET /*/counter/events': { status: 200, body: '' },
    'PUT /-/me/unread': {
      status: 403,
      body: { detail: 'a proxy has replaced the Host (proxy_set_header Host $http_host)' },
    },
  };
  const why =
    'https://count.example/ refuses this page: a proxy has replaced the Host (proxy_set_header Host $http_host)';
  assert.equal(await rescue(ADDRESS, 1, ''), why);
  assert.equal(await rescue(ADDRESS, 2, why), why);
  answers['PUT /-/me/unread'] = { status: 401, body: '<html>' };
  assert.match(await rescue(ADDRESS, 4, why), /a PUT with status 401/);
  answers['PUT /-/me/unread'] = { status: 400, body: {} };
  answers['GET /*/counter/events'] = { status: 200, body: '' };
  assert.equal(await rescue(ADDRESS, 6, why), undefined, 'when that is mended');
});

test('another origin that is not allowed, and one that is null', async () => {
  answers = { 'GET /-/headcount.js': { status: 200, body: '' } };
  assert.match(
    await (
      await fresh()
    )(ADDRESS, 1),
    /^https:\/\/count.example does not allow pages of https:\/\/site.example. Start the server with --allow-origins https:\/\/site.example$/,
  );
  globalThis.origin = 'null';
  assert.match(await (await fresh())(ADDRESS, 1), /whose origin is null.*allow-same-origin.*postMessage/);
  globalThis.location = new URL('https://count.example/framed'); // in a frame with sandbox, of the server's own address
  assert.match(await (await fresh())(ADDRESS, 1), /whose origin is null/);
});

test('a server that comes back between two questions refuses nobody', async () => {
  const { fetch } = globalThis;
  globalThis.fetch = (url, options) => {
    const answer = fetch(url, options);
    answers = {
      'GET /-/headcount.js': { status: 200, body: '' },
      'GET /-/counters': counters,
      'GET /*/counter/events': { status: 200, body: '' },
      'PUT /-/me/unread': { status: 400, body: {} },
    };
    return answer;
  };
  assert.equal(await (await fresh())(ADDRESS, 1), undefined);
  assert.deepEqual(said, []);
});

test('a server that is away is told at the second failure, unless the browser has no network', async () => {
  const rescue = await fresh();
  assert.equal(await rescue(ADDRESS, 1), null);
  navigator.onLine = false;
  assert.equal(await rescue(ADDRESS, 2), null);
  navigator.onLine = true;
  assert.deepEqual(said, []);
  assert.equal(await rescue(ADDRESS, 2), null);
  assert.equal(await rescue(ADDRESS, 4), null);
  assert.equal(said.length, 1);
  assert.match(said[0], /^warn Headcount: https:\/\/count.example\/ does not answer; .*connect-src/);
  answers = { 'GET /-/counters': { status: 503, body: { detail: 'It has not read its store yet.' } } };
  assert.equal(await (await fresh())(ADDRESS, 2), null);
  assert.match(said[1], /^warn .*status 503.*has not read its store/);
});

test('what is no Headcount server is called so', async () => {
  answers = { 'GET /-/counters': { status: 200, body: '<!doctype html>' } };
  assert.match(await (await fresh())(ADDRESS, 1), /is not a Headcount server.*option "server"/);
});

test('the replacement says how long ago the client was welcomed, for a server that was restarted', async () => {
  const rescue = await fresh();
  answers = {
    'GET /-/counters': counters,
    'GET /*/counter/events': { status: 200, body: '' },
    'PUT /-/me/unread': { status: 400, body: {} },
  };
  await rescue(ADDRESS, 1);
  const Replacement = await rescue(ADDRESS, 2);
  const begun = (query) => {
    let first;
    globalThis.fetch = async (url) => {
      first ??= url.href;
      return Response.json({ count: 0 });
    };
    new Replacement(new URL(query, ADDRESS).href).close();
    return first;
  };
  assert.equal(begun('?token=t&back=1234.5'), 'https://count.example/-/me/unread?back=1234.5');
  assert.equal(begun('?token=t'), 'https://count.example/-/me/unread');
  assert.equal(begun('?site=shop&back=7'), 'https://count.example/-/me/unread?back=7&site=shop');
});

test('without storage no cookie goes along', async () => {
  answers = {
    'GET /-/counters': counters,
    'GET /*/counter/events': { status: 200, body: '' },
    'PUT /-/me/unread': { status: 400, body: {} },
  };
  await (await fresh())(new URL('?storage=none', ADDRESS), 1);
  assert.deepEqual(asked, ['GET /-/counters omit', 'PUT /-/me/unread omit', 'GET /*/counter/events omit']);
});

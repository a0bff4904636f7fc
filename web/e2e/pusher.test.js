// The real pusher-js, in node and in Chromium, and the real library of back ends, against a real server: subscribers
// are counted, and what is refused says so.
import assert from 'node:assert/strict';
import { createRequire } from 'node:module';
import { after, before, test } from 'node:test';

import BackEnd from 'pusher';
import Pusher from 'pusher-js';

import { TIMEOUT, eventually, launch, open, startSite } from './browser.js';
import { Server, program } from './server.js';

const KEY = 'key-of-the-app';
const SECRET = 'secret-of-the-app';
const API_KEY = 'key-of-a-server';
const SCRIPT = createRequire(import.meta.url).resolve('pusher-js/dist/web/pusher.js');

let binary;
let server;
let browser;
let sameSite; // a page of another origin on the server's site, which has its cookies
let crossSite; // a page of another site

const options = (url, more) => {
  const { hostname, port } = new URL(url);
  return {
    wsHost: hostname,
    wsPort: port,
    forceTLS: false,
    enabledTransports: ['ws', 'wss'],
    enableStats: false,
    cluster: '',
    ...more,
  };
};

before(
  async () => {
    binary = await program();
    crossSite = await startSite(() => '<!doctype html><html lang="en"><title>Shop</title>');
    sameSite = { url: crossSite.url.replace('localhost', '127.0.0.1') };
    server = await Server.start(binary.path, [
      '--pusher-key',
      KEY,
      '--pusher-secret',
      SECRET,
      '--api-key',
      API_KEY,
      '--allow-origins',
      `${crossSite.url},${sameSite.url}`,
      '--shutdown-timeout',
      '2s',
    ]);
    browser = await launch();
  },
  { timeout: 600_000 },
);

after(async () => {
  await browser?.close();
  crossSite?.close();
  try {
    await server?.stop();
  } finally {
    await binary?.remove();
  }
}, { timeout: TIMEOUT });

/** A connection of node's, which keeps its errors. */
function connect(t, { key = KEY, ...more } = {}) {
  const pusher = new Pusher(key, options(server.url, more));
  t.after(() => pusher.disconnect());
  pusher.errors = [];
  pusher.connection.bind('error', (error) => pusher.errors.push(error.error?.data ?? error.data));
  return pusher;
}

/** Subscribes, and keeps the newest count and the error of the channel. */
function enter(pusher, name) {
  const channel = pusher.subscribe(name);
  channel.bind('pusher:subscription_count', (data) => (channel.count = data.subscription_count));
  channel.bind('pusher:subscription_error', (data) => (channel.error = data));
  return channel;
}

const expectCount = (channel, want) => eventually(want, channel.name, () => channel.count);

test('node: subscribers are counted, and leave', async (t) => {
  const [one, two] = [connect(t), connect(t)];
  const mine = enter(one, 'news');
  await expectCount(mine, 1);
  assert.ok(mine.subscribed);
  assert.match(one.connection.socket_id, /^\d+\.\d+$/);
  const theirs = enter(two, 'news');
  await Promise.all([mine, theirs].map((channel) => expectCount(channel, 2)));
  two.unsubscribe('news');
  await expectCount(mine, 1);
  assert.equal(await server.count('news'), 1);
  await expectCount(enter(two, 'sport'), 1);
  await expectCount(enter(two, 'news'), 2);
  two.disconnect();
  await expectCount(mine, 1);
  one.send_event('pusher:ping', {});
  await new Promise((pong) => one.connection.bind('message', ({ event }) => event === 'pusher:pong' && pong()));
  assert.deepEqual([...one.errors, ...two.errors], []);
});

test('node: what is not counted is refused, and the connection stays', async (t) => {
  const authorize = (_, callback) => callback(null, { auth: 'x', channel_data: '{"user_id":"1"}' });
  const pusher = connect(t, { channelAuthorization: { customHandler: authorize } });
  for (const [name, says] of [['presence-room', /says who is there/], ['private-room', /needs an authorization/]]) {
    const channel = enter(pusher, name);
    await eventually(4009, `the status of ${name}`, () => channel.error?.status);
    assert.match(channel.error.error, says);
    assert.equal(channel.subscribed, false);
  }
  const channel = enter(pusher, 'open');
  await expectCount(channel, 1);
  channel.trigger('client-typing', {});
  await eventually(3, 'errors', () => pusher.errors.length);
  assert.deepEqual(pusher.errors.map(({ code }) => code), [4009, 4009, 4301]);
  assert.match(pusher.errors[2].message, /only counts/);
  assert.equal(pusher.connection.state, 'connected');
});

test('node: a wrong key is refused for good', async (t) => {
  const pusher = connect(t, { key: 'another' });
  await eventually('disconnected', 'the state', () => pusher.connection.state);
  assert.equal(pusher.errors[0].code, 4001);
  assert.match(pusher.errors[0].message, /--pusher-key/);
});

test('node: a back end asks for channels, and says that pages were modified', async (t) => {
  const backEnd = (secret) => new BackEnd({ appId: '7', key: KEY, secret, host: '127.0.0.1', port: server.port });
  const app = backEnd(SECRET);
  const ask = async (path, params) => (await app.get({ path, params })).json();
  const [one, two] = [connect(t), connect(t)];
  await expectCount(enter(one, 'office-1'), 1);
  await expectCount(enter(two, 'office-1'), 2);
  await expectCount(enter(two, 'office-2'), 1);

  const info = 'subscription_count,user_count';
  assert.deepEqual(await ask('/channels', { filter_by_prefix: 'office-', info }), {
    channels: {
      'office-1': { subscription_count: 2, user_count: 2 },
      'office-2': { subscription_count: 1, user_count: 1 },
    },
  });
  assert.deepEqual(await ask('/channels/office-1', { info: 'subscription_count' }), {
    occupied: true,
    subscription_count: 2,
  });
  assert.deepEqual(await ask('/channels/nobody'), { occupied: false });

  const call = (method, path) => fetch(server.url + path, { method, headers: { 'X-API-Key': API_KEY } });
  assert.equal((await call('PUT', '/-/users/ann/follows/office-1')).status, 204);
  await app.trigger(
    ['office-1', 'office-2'],
    'headcount:changed',
    { room: 'Größe' },
    { socket_id: one.connection.socket_id },
  );
  await app.triggerBatch([
    { channel: 'office-1', name: 'headcount:changed', data: {} },
    { channel: 'office-2', name: 'headcount:changed', data: 'x' },
  ]);
  assert.equal((await (await call('GET', '/-/users/ann/unread')).json()).count, 2);

  await assert.rejects(
    app.trigger('office-1', 'order.shipped', {}),
    ({ status, body }) => status === 403 && /carries no messages/.test(body),
  );
  await assert.rejects(
    backEnd('another').get({ path: '/channels' }),
    ({ status, body }) => status === 401 && /--pusher-secret/.test(body),
  );
});

/** A tab with pusher-js, which shows a channel's count. */
async function tab(context, site, channel) {
  const page = await open(context, site.url);
  await page.addScriptTag({ path: SCRIPT });
  await page.evaluate(
    ([key, options, name]) => {
      window.pusher = new window.Pusher(key, options);
      window.pusher
        .subscribe(name)
        .bind('pusher:subscription_count', (data) => (window.count = data.subscription_count));
    },
    [KEY, options(server.url), channel],
  );
  return page;
}

const expectShown = (page, want) => eventually(want, 'the tab shows', () => page.evaluate(() => window.count));

test('Chromium: the tabs of a person count once on the same site, and each for itself on another', async () => {
  const [person, other] = [await browser.newContext(), await browser.newContext()];
  const first = await tab(person, sameSite, 'shop');
  await expectShown(first, 1);
  const second = await tab(person, sameSite, 'shop');
  await expectShown(second, 1);
  const visitor = await tab(other, sameSite, 'shop');
  await Promise.all([first, second, visitor].map((page) => expectShown(page, 2)));
  const foreign = [await tab(person, crossSite, 'shop'), await tab(person, crossSite, 'shop')];
  await Promise.all([first, visitor, ...foreign].map((page) => expectShown(page, 4)));
  for (const page of foreign) await page.close();
  await expectShown(first, 2);
  await first.close();
  await other.close();
  await expectShown(second, 1);
  assert.deepEqual(second.complaints, []);
  await person.close();
});

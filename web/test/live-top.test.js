// The list of the most viewed pages, without a document.
import assert from 'node:assert/strict';
import { mock, test } from 'node:test';

import { Headcount } from '../headcount.js';
import { settle, tick } from './fake.js';

globalThis.document = Object.assign(new EventTarget(), { hidden: false });
globalThis.location = new URL('https://site.example/');
const { watchTop } = await import('../live-top.js');

/** An event stream that has one event and goes on, until the signal. */
const stream = (top, signal) =>
  new Response(
    new ReadableStream({
      start(into) {
        into.enqueue(new TextEncoder().encode(`data: ${JSON.stringify({ top })}\n\n`));
        signal?.addEventListener('abort', () => into.error(signal.reason));
      },
    }),
  );

test('a token that has expired while the network was away ends the list no sooner than another', async () => {
  mock.timers.enable({ apis: ['setTimeout'] });
  mock.method(Math, 'random', () => 1);
  let online = false;
  let asked = 0;
  globalThis.fetch = async () => {
    if (!online) throw new TypeError('no network');
    asked++;
    return Response.json({ detail: 'the token has expired' }, { status: 401 });
  };
  Headcount.defaults = { server: 'https://top.example', token: 'fixed' };
  const ends = [];
  const stop = watchTop(() => {}, { failed: (_, final) => ends.push(final) });
  for (let i = 0; i < 10; i++) await tick(30_000);
  online = true;
  for (let i = 0; i < 5; i++) await tick(30_000);
  assert.deepEqual([asked, ends.includes(true)], [5, false], 'the application may have another one by now');
  for (let i = 0; i < 5; i++) await tick(30_000);
  assert.deepEqual([asked, ends.at(-1)], [6, true]);
  stop();
  await settle();
  mock.timers.reset();
  mock.restoreAll();
});

test('a list that the server refuses to one user is asked for again for the next', async () => {
  Headcount.defaults = { server: 'https://users.example', token: 'ann' };
  const headcount = Headcount.at({ server: 'https://users.example' });
  const asked = [];
  globalThis.fetch = async (_, { headers: { Authorization } }) => {
    asked.push(Authorization);
    return Authorization === 'Bearer ann' ? Response.json({ detail: 'private' }, { status: 403 }) : stream([]);
  };
  const seen = [];
  const stop = watchTop((top) => seen.push(top.length), {
    server: 'https://users.example',
    failed: (_, final) => seen.push(final),
  });
  await settle();
  assert.deepEqual(seen, [true]);
  headcount.token = 'bob';
  headcount.dispatchEvent(new Event('user')); // as with a connection
  await settle();
  assert.deepEqual([asked, seen], [['Bearer ann', 'Bearer bob'], [true, 0]]);
  stop();
  headcount.dispatchEvent(new Event('user'));
  await settle();
  assert.equal(asked.length, 2);
});

test('a token that has expired each time that the tab is seen again may be renewed each time', async () => {
  mock.timers.enable({ apis: ['setTimeout'] });
  let expired = true;
  globalThis.fetch = async () => {
    expired = !expired;
    return expired ? stream([]) : Response.json({ detail: 'the token has expired' }, { status: 401 });
  };
  const ends = [];
  let lists = 0;
  const where = { server: 'https://again.example' };
  Headcount.defaults = { token: 'a token' };
  const stop = watchTop(() => lists++, { ...where, failed: (_, final) => ends.push(final) });
  for (let i = 0; i < 10; i++) {
    await tick(1_000);
    await tick(1_000);
    for (const hidden of [true, false]) {
      document.hidden = hidden;
      document.dispatchEvent(new Event('visibilitychange'));
    }
  }
  for (let i = 0; i < 2; i++) await tick(1_000);
  assert.deepEqual([lists, ends.includes(true)], [11, false]);
  stop();
  mock.timers.reset();
});

test('a server that does not answer at all is asked again after a minute', async () => {
  mock.timers.enable({ apis: ['setTimeout'] });
  Headcount.defaults = {};
  let asked = 0;
  const hangs = (_, { signal }) =>
    new Promise((_, fail) => {
      asked++;
      signal.addEventListener('abort', () => fail(signal.reason));
    });
  globalThis.fetch = hangs;
  const errors = [];
  const lists = [];
  const stop = watchTop((top) => lists.push(top), {
    server: 'https://silent.example',
    failed: ({ message }, final) => errors.push([message, final]),
  });
  await settle();
  await tick(59_999);
  assert.deepEqual([asked, errors], [1, []]);
  await tick(1);
  assert.deepEqual(errors, [['The server has been silent for a minute.', false]]);
  globalThis.fetch = async (_, { signal }) => stream(['p'], signal);
  await tick(1_000);
  assert.deepEqual(lists, [['p']]);
  globalThis.fetch = hangs;
  await tick(60_000);
  assert.equal(errors.length, 2, 'a stream that falls silent ends, too');
  await tick(1_000);
  assert.equal(asked, 2);
  stop();
  await tick(120_000);
  assert.deepEqual([asked, errors.length], [2, 2], 'who has ended it hears nothing more');
  mock.timers.reset();
});

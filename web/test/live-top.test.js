// The list of the most viewed pages, without a document.
import assert from 'node:assert/strict';
import { mock, test } from 'node:test';

import { Headcount } from '../headcount.js';
import { settle, tick } from './fake.js';

test('a token that has expired while the network was away ends the list no sooner than another', async () => {
  globalThis.document = Object.assign(new EventTarget(), { hidden: false });
  globalThis.location = new URL('https://site.example/');
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
  const { watchTop } = await import('../live-top.js');
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

// The files that headcount.js loads when they are needed. A hook of Node stands for a network that fails once, and for
// a browser that remembers it: under their own names these files can never be loaded.
import assert from 'node:assert/strict';
import { register } from 'node:module';
import { mock, test } from 'node:test';

import { settle, tick } from './fake.js';

register(`data:text/javascript,${encodeURIComponent(`
  export const load = (url, context, next) => {
    if (/[/](live|bell|list|more)[.]js$/.test(url)) throw new Error('no network');
    return next(url, context);
  };
`)}`);

globalThis.document = { hidden: false };
globalThis.location = new URL('https://site.example/path');
const { Headcount, load } = await import('../client.js');

/** What useFollow says of the page p, in a component of React that stays. */
async function follows() {
  const { default: react } = await import('react');
  const { useFollow } = await import('../react.js');
  let get;
  react.__CLIENT_INTERNALS_DO_NOT_USE_OR_WARN_USERS_THEY_CANNOT_UPGRADE.H = {
    useMemo: (make) => make(),
    useSyncExternalStore(subscribe, now) {
      get = now;
      subscribe(() => {});
      return now();
    },
  };
  const all = { state: 'open', follows: async () => ['p'], unread: () => () => {} };
  useFollow('p', { headcount: Object.assign(new EventTarget(), all) });
  return () => get().followed;
}

test('what an element shows is asked for again while it cannot be loaded, and depends on no other file', async () => {
  mock.timers.enable({ apis: ['setTimeout'] });
  const loaded = [];
  for (const file of ['./live.js', './bell.js', './more.js'])
    load(file).then((part) => loaded.push(typeof part.default));
  const followed = await follows();
  await settle();
  assert.deepEqual(loaded, []);
  while (loaded.length < 3 || !followed()) await tick(30_000);
  assert.deepEqual(loaded, ['function', 'function', 'function']);
  mock.timers.reset();
});

test('a change of a counter may be tried again when its file could not be loaded', async () => {
  globalThis.fetch = async () =>
    Response.json({ key: 'likes:1', kind: 'members', value: 1, updated_at: null, version: '1-1', exact: true });
  const likes = new Headcount({ server: 'https://parts.example', storage: 'none' }).counter('likes:1');
  await likes.add().catch(() => {});
  assert.equal((await likes.add()).value, 1);
});

test('the list of a bell may be opened again when its file could not be loaded', async () => {
  const said = mock.method(console, 'error', () => {});
  const { default: bell } = await import('../bell.js?1');
  const button = Object.assign(new EventTarget(), { setAttribute() {} });
  const element = Object.assign(new EventTarget(), { getAttribute: () => null });
  let opened = 0;
  const after = async (calls) => {
    while (opened + said.mock.callCount() < calls) await settle();
  };
  bell({
    element,
    headcount: { unread: () => () => {} },
    root: { querySelector: () => ({ dispatchEvent: () => opened++ }) },
    number: { closest: () => button },
    signal: new AbortController().signal,
  });
  button.dispatchEvent(new Event('click'));
  await after(1);
  button.dispatchEvent(new Event('click'));
  await after(2);
  assert.deepEqual([opened, said.mock.callCount()], [1, 1]);
});

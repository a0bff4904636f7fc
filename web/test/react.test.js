// The hooks, without a renderer: a dispatcher of this test takes the place of React's.
import assert from 'node:assert/strict';
import { mock, test } from 'node:test';

import react from 'react';

import { settle } from './fake.js';
import { useCount, useCounter, useFollow, useUnread } from '../react.js';

test('a hook without a server says so in the console and does not take the application down', () => {
  react.__CLIENT_INTERNALS_DO_NOT_USE_OR_WARN_USERS_THEY_CANNOT_UPGRADE.H = {
    useMemo: (make) => make(),
    useSyncExternalStore(subscribe, get) {
      subscribe(() => {})();
      return get();
    },
  };
  const said = mock.method(console, 'error', () => {});
  // The source is a file here, and the package has no server of its own either.
  assert.deepEqual(useCount('p'), { count: undefined, stale: false, state: 'idle' });
  for (const hook of [useCounter, useFollow, useUnread]) hook('likes:1');
  const words = said.mock.calls.map(({ arguments: [text] }) => text);
  assert.equal(words.length, 4);
  for (const text of words) assert.match(text, /^Headcount: not a server: /);
});

test('a counter that the server refuses shows nothing, and is asked for again after a log-in', () => {
  let get;
  let stop;
  react.__CLIENT_INTERNALS_DO_NOT_USE_OR_WARN_USERS_THEY_CANNOT_UPGRADE.H = {
    useMemo: (make) => make(),
    useSyncExternalStore(subscribe, now) {
      get = now;
      stop = subscribe(() => {});
      return now();
    },
  };
  const watches = [];
  const headcount = Object.assign(new EventTarget(), {
    state: 'idle',
    counter: () => ({
      watch(callback) {
        watches.push(callback);
        return () => watches.splice(watches.indexOf(callback), 1);
      },
    }),
  });
  const dispatch = (type, detail) => headcount.dispatchEvent(new CustomEvent(type, { detail }));

  useCounter('private:1', { headcount });
  watches[0]({ value: 5, mine: true });
  assert.equal(get().value, 5);
  dispatch('user');
  assert.equal(watches.length, 1, 'nothing was refused');

  dispatch('error', { code: 'forbidden', counter: 'private:1' });
  assert.deepEqual([get().value, get().mine], [undefined, false]);
  const [before] = watches;
  dispatch('user');
  assert.equal(watches.length, 1);
  assert.notEqual(watches[0], before, 'it is watched anew');
  watches[0]({ value: 6 });
  assert.equal(get().value, 6);
  stop();
  dispatch('error', { code: 'forbidden', counter: 'private:1' });
  dispatch('user');
  assert.equal(watches.length, 0);
});

test('whether a user follows a page is unknown until the server has said it of this user', async () => {
  let get;
  let begin;
  react.__CLIENT_INTERNALS_DO_NOT_USE_OR_WARN_USERS_THEY_CANNOT_UPGRADE.H = {
    useMemo: (make) => make(),
    useSyncExternalStore(subscribe, now) {
      get = now;
      begin = () => subscribe(() => {});
      return now();
    },
  };
  const answers = [];
  const headcount = Object.assign(new EventTarget(), {
    state: 'open',
    follows: () => new Promise((resolve) => answers.push(resolve)),
    unread: () => () => {},
  });
  const said = async (pages) => {
    while (!answers.length) await settle();
    answers.shift()(pages);
    await settle();
  };
  useFollow('p', { headcount });
  let stop = begin();
  assert.equal(get().followed, undefined);
  await said(['p']);
  assert.equal(get().followed, true);

  headcount.dispatchEvent(new CustomEvent('user'));
  assert.equal(get().followed, undefined, 'the next user is another one');
  headcount.dispatchEvent(new CustomEvent('state'));
  await said(['p']);
  assert.equal(get().followed, true);

  stop(); // React takes a component away for a while, and another user logs in
  headcount.dispatchEvent(new CustomEvent('user'));
  stop = begin();
  assert.equal(get().followed, undefined);
  await said([]);
  assert.equal(get().followed, false);
  stop();
});

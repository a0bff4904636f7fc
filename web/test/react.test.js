// The hooks, without a renderer: a dispatcher of this test takes the place of React's.
import assert from 'node:assert/strict';
import { mock, test } from 'node:test';

import react from 'react';

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

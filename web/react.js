// @ts-check
'use client';
// React hooks, the second entry of the npm package: headcount-web/react. A server
// that renders shows what is not known yet, and connects nothing.
import { useMemo, useSyncExternalStore } from 'react';

import { MORE, load } from './client.js';
import { Headcount } from './headcount.js';

/** @typedef {import('./react.js').Where} Where */

/** The Headcount that a hook uses: that of the elements with the same server and storage, or one's own. */
const at = (/** @type {Where} */ { headcount, server, storage }) => headcount ?? Headcount.at({ server, storage });

/**
 * What a hook knows, as React wants it: the same object until something changes.
 * @template {object} T
 * @param {T} unknown
 * @param {Where} where
 * @param {(headcount: Headcount, learn: (news: Partial<T>) => void) => () => void} begin begins to listen, and
 *   returns what ends it
 */
function store(unknown, where, begin) {
  let now = { ...unknown, state: /** @type {import('./headcount.js').State} */ ('idle') };
  const first = now;
  return {
    get: () => now,
    first: () => first,
    subscribe(/** @type {() => void} */ changed) {
      now = first; // what was known to a component that was away may be that of the user before
      const learn = (/** @type {any} */ news) => {
        now = { ...now, ...news };
        changed();
      };
      /** @type {Headcount} */ let headcount;
      const state = () => learn({ state: headcount.state });
      let stop = () => {};
      // An error is said in the console, as elements do; React would take the whole app down.
      const complain = (/** @type {any} */ error) => console.error(error.message);
      try {
        headcount = at(where);
      } catch (error) {
        complain(error);
        return stop;
      }
      try {
        stop = begin(headcount, learn);
      } catch (error) {
        complain(error);
      }
      headcount.addEventListener('state', state);
      if (headcount.state !== now.state) state();
      return () => {
        headcount.removeEventListener('state', state);
        stop();
      };
    },
  };
}

const STAY_MS = 2_000; // how long a user stays whose component has gone: it may be back, or the next one counts them

/** @type {<T>(made: {get: () => T, first: () => T, subscribe: (changed: () => void) => () => void}) => T} */
const useStore = (made) => useSyncExternalStore(made.subscribe, made.get, made.first);

/**
 * How many people are on a page, the user included; without a page on this one, also
 * when its address changes.
 * @param {string} [page]
 * @param {Where & {watch?: boolean}} [options]
 */
export function useCount(page, { watch = false, headcount, server, storage } = {}) {
  const made = useMemo(
    () =>
      store(
        /** @type {{count?: number, stale: boolean}} */ ({ count: undefined, stale: false }),
        { headcount, server, storage },
        (headcount, learn) => {
          let over = false;
          const end = headcount.here((counter) => over || learn({ count: counter?.count, stale: !!counter?.stale }), {
            page,
            watch,
          });
          return () => {
            over = true;
            setTimeout(end, STAY_MS);
          };
        },
      ),
    [page, watch, headcount, `${server}`, storage],
  );
  return useStore(made);
}

/**
 * A counter that lasts, and its changes.
 * @param {string} key
 * @param {Where} [options]
 */
export function useCounter(key, { headcount, server, storage } = {}) {
  const made = useMemo(() => {
    const where = { headcount, server, storage };
    return {
      ...store(
        /** @type {{value?: number, mine: boolean, stale: boolean}} */ ({
          value: undefined,
          mine: false,
          stale: false,
        }),
        where,
        (headcount, learn) => {
          const end = new AbortController();
          const { signal } = end;
          const watch = () =>
            headcount.counter(key).watch(({ value, mine = false, stale = false }) => learn({ value, mine, stale }));
          let stop = watch();
          let refused = false;
          headcount.addEventListener(
            'error',
            ({ detail }) => {
              if (detail.counter !== key) return;
              refused = true;
              learn({ value: undefined, mine: false, stale: false });
            },
            { signal },
          );
          // The next user may see what this one may not.
          const again = () => {
            if (!refused) return;
            refused = false;
            stop();
            stop = watch();
          };
          headcount.addEventListener('user', again, { signal });
          return () => {
            end.abort();
            stop();
          };
        },
      ),
      actions: {
        add: () => at(where).counter(key).add(),
        remove: () => at(where).counter(key).remove(),
        increment: () => at(where).counter(key).increment(),
      },
    };
  }, [key, headcount, `${server}`, storage]);
  return { ...useStore(made), ...made.actions };
}

/**
 * Whether the user follows a page, and the change of it.
 * @param {string} page
 * @param {Where} [options]
 */
export function useFollow(page, { headcount, server, storage } = {}) {
  const made = useMemo(() => {
    const where = { headcount, server, storage };
    return {
      ...store(/** @type {{followed?: boolean}} */ ({ followed: undefined }), where, (headcount, learn) => {
        const end = new AbortController();
        const told = (/** @type {boolean | undefined} */ yes) => learn({ followed: yes });
        load(MORE).then(
          ({ followed }) => end.signal.aborted || followed(headcount, page, told, console.error, end.signal),
        );
        return () => end.abort();
      }),
      actions: { follow: () => at(where).follow(page), unfollow: () => at(where).unfollow(page) },
    };
  }, [page, headcount, `${server}`, storage]);
  return { ...useStore(made), ...made.actions };
}

/**
 * How many notifications of the user are unread.
 * @param {Where} [options]
 */
export function useUnread({ headcount, server, storage } = {}) {
  const made = useMemo(() => {
    const where = { headcount, server, storage };
    return {
      ...store(/** @type {{count?: number}} */ ({ count: undefined }), where, (headcount, learn) =>
        headcount.unread((count) => learn({ count })),
      ),
      actions: { read: () => at(where).read() },
    };
  }, [headcount, `${server}`, storage]);
  return { ...useStore(made), ...made.actions };
}

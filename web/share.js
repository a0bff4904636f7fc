// @ts-check
// How the tabs of a site share one connection.
//
// One tab holds a Web Lock and has the Hub. The others talk to it over a BroadcastChannel. They always send
// everything they want, so a lost word or a new Hub needs no special treatment. Without Web Locks (plain http on the
// network), and where tabs are not to share, each has a Hub of its own.

import { Hub } from './hub.js';
import { ask, idOf, userOf } from './identity.js';

const SILENCE_MS = 3_000; // when the tab with the connection is silent this long, it sleeps and another tab takes over
const LOOK_MS = 5_000; // how often a tab that is seen asks whether there is such silence

/** @typedef {import('./client.js').State} State */
/** @typedef {import('./identity.js').Token} Token */
/** @typedef {import('./link.js').Frame} Frame */
/** join is a part of watch. @typedef {{join: string[], watch: string[], hidden: number, unread: boolean, read: boolean, token?: string | false}} Wants */

/**
 * What a word between tabs may have, and of which type. Any script of this origin may send something else.
 *
 *   all that a tab wants, to the tab with the Hub     from, wants, wake (at once)
 *   its answer                                        to, full (no room), state, frame (unread), id (the user's)
 *   what the server sends, to all tabs                frame, link (which it came over)
 *   how the connection is, to all tabs                state, id
 *   another tab has the Hub: say again what you want  lead
 *   the user may be another one: find out             user
 *
 * @typedef {{from?: number, wants?: Wants, wake?: boolean, to?: number, full?: boolean, state?: State,
 *   frame?: Frame, link?: number, id?: string, lead?: number, user?: boolean}} Word
 */
const EXAMPLE = {
  from: 0, to: 0, link: 0, lead: 0,
  wake: true, full: true, user: true,
  state: '', id: '',
  wants: {}, frame: {},
};

/** What is legal of what came over the channel. @type {(data: any) => Word} */
const legal = (data) =>
  Object.fromEntries(
    Object.entries(data ?? {}).filter(([name, value]) => typeof value === typeof (/** @type {any} */ (EXAMPLE)[name])),
  );

/**
 * This tab's part in the sharing, from _meet to _end.
 * @param {URL} base of the server
 * @param {boolean} keep whether the user's id may be stored
 * @param {boolean} together whether this tab uses the connection of another one, or lends its own
 * @param {() => Token | undefined} getToken
 * @param {{_tell(): void, _hear(word: Word): void}} tab _tell says what the tab wants, by way of _tell here;
 *   _hear takes words from the tab with the Hub
 */
export function Share(base, keep, together, getToken, tab) {
  const id = Math.random(); // our name among the tabs
  const end = new AbortController(); // releases the locks
  const { signal } = end;
  /** @type {string | undefined} */ let user; // whose connection this is, by the token
  /** @type {ReturnType<typeof Hub> | undefined} */ let hub; // set if this tab has the connection
  /** @type {((word: Word) => void) | undefined} */ let post; // sends to the other tabs
  /** @type {any} */ let silence; // timer: another tab is asked and does not answer

  const atEnd = (/** @type {any} */ step) => signal.addEventListener('abort', step);
  const heard = () => {
    silence = clearTimeout(silence);
  };
  const same = (/** @type {string | undefined} */ token) => (user ??= userOf(token)) === userOf(token);

  const hear = (/** @type {Word} */ word) => {
    if (word.to && word.to !== id) return;
    heard();
    if (word.id) idOf(base, keep, word.id);
    tab._hear(word);
    if (word.lead) tab._tell();
  };

  /** From now on this tab has the connection. */
  const lead = () => {
    heard();
    hub = Hub(base, keep, getToken, same, (word) => {
      hear(word);
      post?.(word);
    });
    tab._tell();
  };

  /** Shares with the tabs of a user that have the name. */
  const join = (
    /** @type {LockManager} */ locks,
    /** @type {string} */ name,
    /** @type {BroadcastChannel} */ channel,
  ) => {
    /** @type {(lock: string, held: () => unknown, options?: LockOptions) => Promise<unknown>} */
    const hold = (lock, held, options = { signal }) =>
      locks.request(
        lock,
        options,
        () => new Promise((release) => (signal.aborted || held() ? release(0) : atEnd(release))),
      );

    /** @type {(options?: LockOptions) => unknown} */
    const take = (options) =>
      hold(
        name,
        () => {
          lead();
          channel.postMessage({ lead: id });
        },
        options,
      ).catch(() => {
        // Another tab took the lock because this tab was asleep. Wait for the lock again.
        if (signal.aborted) return;
        hub?._hangUp();
        hub = undefined;
        if (!options) take();
        tab._tell();
      });

    /** @type {Set<number>} */ const known = new Set(); // the tabs that want something from this Hub
    channel.onmessage = ({ data }) => {
      const word = legal(data);
      const { from, wants, wake } = word;
      if (!from) return (hub && !word.user) || hear(word);
      if (!hub || !wants?.join?.map || !wants.watch?.map) return;
      // The lock becomes free when that tab is gone, for whatever reason.
      if (!known.has(from))
        hold(name + from, () => {
          hub?._lost(from);
          return known.delete(from);
        }).catch(() => {});
      known.add(from);

      const full = !hub._set(from, wants, wake);
      // A tab that gets no answer takes over.
      if (wants.token === false && hub._stuck()) return;
      channel.postMessage({ to: from, full, ...hub._news() });
    };
    atEnd(() => channel.close());

    // Some browsers have Web Locks that are never granted. Then this tab has a connection of its own.
    const alone = setTimeout(() => {
      channel.close();
      lead();
    }, SILENCE_MS);
    atEnd(() => clearTimeout(alone));

    // This tab holds the lock of its own name as long as it exists.
    hold(name + id, () => {
      if (hub) return true; // too late
      clearTimeout(alone);
      post = (word) => {
        channel.postMessage(word);
        if (!hub) silence ??= setTimeout(take, SILENCE_MS, { steal: true });
      };
      take();
      tab._tell();
      // Somebody who only looks notices, too, when the tab with the connection sleeps.
      const look = setInterval(() => hub || document.hidden || tab._tell(), LOOK_MS);
      atEnd(() => clearInterval(look));
    }).catch(() => {
      // Some contexts have Web Locks but forbid their use.
      clearTimeout(alone);
      return signal.aborted || hub || lead();
    });
  };

  return {
    /** Whether this tab has the connection. */
    _leads: () => !!hub,

    /** Finds out which tab has the connection. This tab takes it if no other tab has it. */
    async _meet() {
      const locks = together && navigator.locks;
      if (!locks) return lead();
      /** @type {BroadcastChannel} */ let channel;
      let name = `headcount ${base} `;
      try {
        same(await ask(getToken())); // not if a token that was set meanwhile was faster
        if (signal.aborted) return;
        if (user === undefined) return lead();
        name += user; // tabs of different users have nothing to share
        channel = new BroadcastChannel(name);
      } catch {
        // There is no token now, or the browser forbids storage, and channels with it.
        return signal.aborted || lead();
      }
      join(locks, name, channel);
    },

    /** Tells the tab with the connection what this one wants. wake: somebody looks at it. @type {(wants: Wants, wake: boolean) => void} */
    _tell(wants, wake) {
      if (!hub) post?.({ from: id, wants, wake });
      else if (!hub._set(id, wants, wake)) hear({ full: true });
    },

    /** Whether a token is one of the user whose connection this is. */
    _same: same,

    /** Has the other tabs find out whether the user is another one. */
    _doubt() {
      post?.({ user: true });
    },

    /** Gives up the connection, without a leave. */
    _end() {
      heard();
      hub?._hangUp();
      hub = post = undefined;
      end.abort();
    },
  };
}

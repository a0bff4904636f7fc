// @ts-check
// The part of the tab that has the connection: it keeps the connection up, and serves all tabs that share it.

import { ask, idOf, timely } from './identity.js';
import { Link, MAX_PAGES, refused } from './link.js';

const BACKOFF_MS = 1_000; // the first retry comes within this time, ...
const BACKOFF_SOON_MS = 2_000; // ... those of about a minute within this, since a restart takes seconds, ...
const SOON = 60;
// A page that is refused asks less often before that: the browser's console has lines of each attempt.
const SOON_REFUSED = 6;
const BACKOFF_MAX_MS = 30_000; // ... and the later ones within this
const STEADY_MS = 10_000; // after a connection of this length, earlier failures do not count
const GRACE_MS = 2_000; // how long the wants of a tab that vanished are kept: the tab may just reload
const IDLE_MS = 5_000; // a connection of which nothing has been wanted for this long is closed

/** @typedef {import('./client.js').State} State */
/** @typedef {import('./identity.js').Token} Token */
/** @typedef {import('./link.js').Frame} Frame */
/** @typedef {import('./share.js').Wants} Wants */
/** @typedef {import('./share.js').Word} Word */

/** @type {(pages: Iterable<string>, without: Set<string> | undefined) => string[]} */
const minus = (pages, without) => [...pages].filter((page) => !without?.has(page));

/**
 * Has the connection for all tabs that share it.
 * @param {URL} base
 * @param {boolean} keep whether the user's id may be stored
 * @param {() => Token | undefined} getToken
 * @param {(token: string | undefined) => boolean} same whether a token is of the user whose connection this is
 * @param {(word: Word) => void} say
 */
export function Hub(base, keep, getToken, same, say) {
  /** @type {Map<number, Omit<Wants, 'join' | 'watch'> & {join: Set<string>, watch: Set<string>}>} */ const members =
    new Map(); // what each tab wants
  let toRead = false; // "read" must still be sent

  /** What a tab that comes later is told. */
  const news = {
    /** @type {State} */ _state: 'idle',
    /** @type {Frame} */ _unread: 0, // the newest number
    _issued: '', // the anonymous id
  };

  // Usually there is one link. There are two while a server that shuts down sends
  // us to another: the old link stays until the new one is welcome, so the user
  // stays counted.
  /** @type {Set<Link>} */ const links = new Set();
  /** @type {any} */ let idle; // timer that closes a connection of which nothing is wanted

  /** The attempts to connect. */
  const attempts = {
    /** @type {any} */ _next: 0, // timer
    _dialing: false,
    _over: false, // there are no more of them
    _number: 0, // which determines how long the next one waits
    _failures: 0, // in a row: the server did not welcome us
    _refusal: '', // why the server does not let this page in
    /** @type {unknown} */ _expired: 0, // a fixed token that the server called expired; another attempt with it is useless
    /** @type {any} */ _welcomed: 0, // when the last link was made over which a server welcomed us
    /** @type {any} */ _rescue: 0, // the file of that name, once it is loaded
  };

  const all = (/** @type {'join' | 'watch'} */ kind) =>
    new Set([...members.values()].flatMap((member) => [...member[kind]]));

  /** The fixed token for the next attempt: a tab that has been open for long may have one that has expired. */
  const given = () => {
    const tokens = [...members.values()]
      .map(({ token }) => token)
      .filter((token) => token && token !== attempts._expired);
    return tokens[attempts._failures % tokens.length];
  };

  const wanted = () => toRead || all('watch').size || [...members.values()].some((m) => m.unread);

  /** Sends over a link the difference between what is wanted and what was sent before. */
  const sync = (/** @type {Link} */ link) => {
    if (!link._open) return;
    const paused = [...members.values()].every((member) => member.hidden);
    if (paused !== link._paused) link._send({ type: paused ? 'pause' : 'resume' });
    link._paused = paused;
    const joined = all('join');
    const pages = all('watch');
    if (!paused) {
      link._subscribe([...link._owed].filter((topic) => pages.has(topic)));
      link._owed.clear();
    }
    // A join also subscribes. An explicit subscription continues after a leave.
    const subscribe = minus(minus(pages, joined), link._subscribed);
    const unsubscribe = minus(link._subscribed, pages);
    const steps = [
      () => {
        for (const page of minus(joined, link._joined)) link._send({ type: 'join', page });
        link._subscribe(subscribe);
      },
      () => {
        for (const page of minus(link._joined, joined)) link._send({ type: 'leave', page });
        link._subscribe(unsubscribe, 'unsubscribe');
      },
    ];
    // A user who moves from one page to another joins before leaving. Otherwise the
    // whole site's count would fall and rise. If joining first would exceed the
    // server's bound, the leave comes first.
    if (new Set([...link._joined, ...link._subscribed, ...pages]).size > MAX_PAGES) steps.reverse();
    for (const step of steps) step();
    link._joined = joined;

    if (toRead) link._send({ type: 'read' });
    toRead = false;

    if (wanted()) idle = clearTimeout(idle);
    else idle ||= setTimeout(() => {
      idle = 0;
      if (wanted()) return;
      news._unread = 0; // nobody tells us of its changes from now on
      links.forEach((link) => link._end());
    }, IDLE_MS);
  };
  const syncAll = () => links.forEach(sync);

  const complain = (/** @type {string} */ code, /** @type {string} */ message) =>
    say({ frame: { type: 'error', code, message } });

  /** Determines the state and reports it if it has changed. */
  const show = () => {
    /** @type {State} */
    const now = [...links].some((link) => link._welcome)
      ? 'open'
      : attempts._refusal
        ? 'refused'
        : links.size || attempts._dialing
          ? 'connecting'
          : wanted()
            ? 'waiting'
            : 'idle';
    if (now !== news._state && !attempts._over)
      say({ state: (news._state = now), id: now === 'open' ? news._issued : '' });
  };

  /** Full jitter: a random time up to a bound, so that many clients do not come back at once. */
  const backoff = () => {
    const soon = attempts._refusal ? SOON_REFUSED : SOON;
    const most = !attempts._number++ ? BACKOFF_MS : attempts._number < soon ? BACKOFF_SOON_MS : BACKOFF_MAX_MS;
    return Math.random() * most;
  };

  /** Plans the next attempt after ms. It replaces an earlier plan. */
  const later = (/** @type {number} */ ms) => {
    clearTimeout(attempts._next);
    attempts._next =
      wanted() &&
      setTimeout(() => {
        attempts._next = 0;
        dial();
      }, ms);
  };

  /** Whether there is a link, open or connecting, that the server has not asked to end. */
  const served = () => attempts._dialing || [...links].some((link) => !link._draining);

  /** Whether the server takes no token that there is. Another tab may ask a function for one. */
  const stuck = () =>
    news._state !== 'open' && (attempts._expired || attempts._refusal) && typeof getToken() === 'string';

  const dial = async () => {
    const token = getToken();
    const asks = typeof token === 'function';
    // The token has expired: the tab that has a newer token continues.
    if (attempts._over || served() || !wanted() || (attempts._expired && !asks && !given())) return show();
    attempts._dialing = true;
    show();
    /** @type {Link | undefined} */ let link;
    try {
      const address = new URL('-/ws', base);
      address.protocol = address.protocol.replace('http', 'ws');
      address.search = base.search; // a page of the server's own names a site
      const fixed = !asks && given();
      const now = fixed || (await ask(token));
      if (!same(now)) {
        say({ user: true });
        throw 'the token is of another user';
      }
      const id = now ? '' : idOf(base, keep);
      if (now) address.searchParams.set('token', now);
      else if (id) address.searchParams.set('id', id);
      if (!keep) address.searchParams.set('storage', 'none');
      else if (id && base.origin === location.origin) address.searchParams.set('storage', 'partitioned'); // a frame
      // A server that was restarted learns from us how long ago we were welcomed.
      if (attempts._welcomed)
        address.searchParams.set('back', /** @type {any} */ (performance.now() - attempts._welcomed));
      let Socket = globalThis.WebSocket;
      if (attempts._failures) {
        // Another file, which is seldom needed, finds the cause and an alternative.
        const file = `./rescue.js?${attempts._failures}`;
        attempts._rescue ||= await timely(import(file)).catch(() => {});
        const found = await attempts._rescue?.default(address, attempts._failures, attempts._refusal, links);
        if (typeof found === 'string') {
          if (found !== attempts._refusal)
            complain('refused', (attempts._refusal = found));
        } else if (found !== undefined) {
          attempts._refusal = '';
          Socket = found ?? Socket;
        }
      }
      if (attempts._over) return;
      const made = (link = Link(new Socket(address.href, 'headcount.v1'), {
        _opened() {
          sync(made);
          show();
        },
        _frame: (frame) => heard(made, frame, fixed),
        _ended() {
          links.delete(made);
          if (!served()) later(backoff());
          show();
          if (stuck()) say({ lead: 1 }); // all tabs ask, and one may get no answer
        },
      }));
      attempts._failures++; // the welcome sets it to 0
      links.add(link);
    } catch (cause) {
      complain('connect', `${cause}`);
    }
    attempts._dialing = false;
    if (!link) later(backoff());
    show();
  };

  // ---- what the server sends

  const heard = (/** @type {Link} */ link, /** @type {Frame} */ frame, /** @type {unknown} */ token) => {
    const { type, code } = frame;
    if (type === 'welcome') {
      link._welcome = true;
      attempts._failures = 0;
      attempts._refusal = '';
      attempts._welcomed = link._made;
      link._heartbeat = frame.heartbeat_ms || link._heartbeat;
      setTimeout(() => links.has(link) && (attempts._number = 0), STEADY_MS);
      news._issued = frame.id;
      if (news._issued) idOf(base, keep, news._issued);
      links.forEach((other) => other === link || other._end());
      return show();
    }
    if (type === 'reconnect') {
      link._draining = true;
      return attempts._next || served() || later(frame.after_ms); // once it is planned, another frame changes nothing
    }
    if (type === 'unread') news._unread = frame;
    const topic = refused(frame);
    if (topic)
      for (const { join, watch } of [...members.values(), { join: link._joined, watch: link._subscribed }]) {
        join.delete(topic);
        watch.delete(topic);
      }
    // The whole frame was refused. What else was in it is said again when all refusals that are under way have come,
    // which the answer to a heartbeat shows: each topic may cost one error, since the server takes twenty.
    if (topic || code === 'rate_limited')
      link._again ||= setTimeout(() => link._send({ type: 'heartbeat' }), topic ? 0 : GRACE_MS);
    if (type === 'heartbeat' && link._again) {
      link._again = 0;
      link._joined.clear();
      link._subscribed.clear();
      sync(link);
    }
    if (code === 'token_expired') {
      if (token) console.error(frame.message); // it is fixed: nobody is asked for a new one
      attempts._expired = token;
    }
    // The answer to a heartbeat, and frames of later servers, only show that the server lives.
    say({ frame, link: link._made });
  };

  return {
    /** For a tab that comes later. */
    _news: () => ({ state: news._state, frame: news._unread, id: news._issued }),

    /**
     * Takes what one tab wants. wake: somebody looks at the tab, or the network is
     * back, so the next attempt comes at once. Returns false if there is no room.
     * @type {(id: number, wants: Wants, wake?: boolean) => boolean}
     */
    _set(id, wants, wake) {
      const { join, watch } = wants;
      const old = members.get(id);
      // An older release sends them apart.
      members.set(id, { ...wants, join: new Set(join), watch: new Set([...join, ...watch]) });
      if (all('watch').size > MAX_PAGES && members.size > 1) {
        // Its earlier wants stay until the tab is gone from this Hub, which is soon.
        old ? members.set(id, old) : members.delete(id);
        return false;
      }
      for (const topic of minus(watch, old?.watch))
        for (const link of links) if (link._joined.has(topic) || link._subscribed.has(topic)) link._owed.add(topic);
      if (wants.unread && !old?.unread && news._unread) say({ frame: news._unread });
      toRead ||= wants.read;
      syncAll();
      if (wake) {
        links.forEach((link) => link._probe());
        if (!links.size) {
          clearTimeout(attempts._next);
          attempts._number = attempts._next = 0;
        }
      }
      // A link that the server asked to end has its own plan for the next attempt.
      if (!attempts._next && !links.size) dial();
      return true;
    },

    _stuck: stuck,

    /** @param {number} id of a tab that vanished: the tab may come back under another id */
    _lost(id) {
      setTimeout(() => {
        members.delete(id);
        syncAll();
      }, GRACE_MS);
    },

    _hangUp() {
      attempts._over = true;
      links.forEach((link) => link._end());
      clearTimeout(attempts._next);
    },
  };
}


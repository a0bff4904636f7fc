// @ts-check
// A Headcount knows what its tab wants and what is known about that.

import { SEED, ask, idOf, timely } from './identity.js';
import { COUNTER, MAX_PAGES, refused } from './link.js';
import { Share } from './share.js';

const AGAIN_MS = 30_000; // a file that could not be loaded is asked for again after this time
const LATE_MS = 1_000; // what another tab has put into the storage is seen within this time
const PAUSE_MS = 5_000; // a tab that was hidden this long gets no counts, ...
const AWAY_MS = 50_000; // ... and after this and as long again it is not counted, if countHidden is false

const HOME = new URL('..', import.meta.url); // the server that this file came from

/** @typedef {import('./identity.js').Token} Token */
/** @typedef {import('./link.js').Frame} Frame */
/** @typedef {import('./share.js').Word} Word */
/**
 * A page's count, as the server sends it.
 * @typedef {object} Counter
 * @property {string} page
 * @property {number} count how many people are there
 * @property {string | null} updated_at when the count last changed
 * @property {string} version
 * @property {boolean} [stale] true while the server cannot be sure that the count is right
 */
/**
 * A counter that lasts, as the server sends it.
 * @typedef {object} CounterValue
 * @property {string} key
 * @property {'sum' | 'exact' | 'members' | 'unique'} kind
 * @property {number} value
 * @property {boolean} [mine] true if the user is one of its members
 * @property {string | null} updated_at when the value last changed
 * @property {string} version
 * @property {boolean} exact false if the value is an estimate, or may lag
 * @property {boolean} [stale] true while the server cannot be sure that the value is right
 */
/**
 * @typedef {object} CounterHandle
 * @property {string} key
 * @property {{(callback: (counter: CounterValue) => void): () => void,
 *   (): AsyncGenerator<CounterValue, void, void>}} watch like Headcount.watch
 * @property {number | undefined} value the newest value, while something watches the counter
 * @property {() => Promise<CounterValue>} add makes the user a member
 * @property {() => Promise<CounterValue>} remove
 * @property {() => Promise<CounterValue>} increment adds one
 */
/** @typedef {'idle' | 'connecting' | 'open' | 'waiting' | 'refused' | 'closed'} State */
/**
 * @typedef {object} Options
 * @property {string | URL} [server] where the server is; default where this file came from
 * @property {'none'} [storage] none: neither cookie nor storage; the user has an id as long as this document lives
 * @property {Token} [token] says who the user is, if the server requires tokens; a function is called for
 *   every connection
 * @property {boolean} [countHidden] false: a tab that was hidden for a minute is not counted; default true
 * @property {'path' | 'url' | 'hash' | `query:${string}`} [pageFrom] what the page's own name is made of: path (the default),
 *   url, hash, or query:p; in Headcount.defaults alone
 * @property {boolean} [share] false: no other tab uses this connection; default true
 */

/** @type {(target: EventTarget, type: string, detail?: unknown) => unknown} */
const emit = (target, type, detail) => target.dispatchEvent(new CustomEvent(type, { detail }));

/** @type {Record<string, string>} */ const names = {}; // those that other files of the client are asked for by

/** Loads another file of the client. Browsers remember a failure, so the next attempt has another name. */
const part = (/** @type {string} */ file, name = (names[file] ??= file)) =>
  import(name).catch((error) => {
    names[file] = `${name}?1`;
    throw error;
  });

/** Loads what elements show, until that succeeds. @type {(file: string) => Promise<any>} */
export const load = (file) =>
  part(file).catch(() => new Promise((again) => setTimeout(again, AGAIN_MS)).then(() => load(file)));

/** What all elements need, and what only some pages do. */
export const LIVE = './live.js';
export const MORE = './more.js';

/**
 * A connection to a Headcount server, kept up until close().
 *
 * Events: `state` (detail: the new state), `count` (detail: the page's counter),
 * `counter` (detail: the counter that lasts), `unread` (detail: the number),
 * `follow` (detail: {page, followed}, after a change that this document made),
 * `error` (detail: {code, message, page, counter}).
 *
 * States: `idle` (nothing was requested yet), `connecting`, `open` (the server has
 * greeted us), `waiting` (for the next attempt), `refused` (the server does not let
 * this page in; the console says why, and attempts go on), `closed`.
 */
export class Headcount extends EventTarget {
  /** What holds where nothing else is said, for elements too. @type {Options} */
  static defaults = {};

  /** The one connection that all elements of this document share. */
  static get shared() {
    return Headcount.at();
  }

  /**
   * The one that elements with this server and storage share.
   * @param {{server?: string | URL, storage?: 'none'}} [where]
   */
  static at({ server, storage } = {}) {
    return (shared[/** @type {any} */ ([server, storage])] ??= new Headcount({
      ...(server && { server }),
      ...(storage && { storage }),
    }));
  }

  #base;
  /** @type {Token | undefined} */ #token;
  #keep; // whether the user's id may be stored
  #share;
  /** @type {any} */ #countHidden; // the constructor sets it

  // What is wanted.
  /** @type {Set<{page: string}>} */ #joins = new Set(); // without those that were taken back
  /** @type {Set<{_keys: string[], _callback: (value: any) => void}>} */ #watches = new Set(); // a key is a topic, or '' for unread
  #read = false; // "read" must still be sent
  // What is known about the wanted topics and unread: at most MAX_PAGES + 1 entries.
  /** @type {Map<string, {value: any, link?: unknown}>} */ #known = new Map();
  /** @type {State} */ #state = 'idle';

  /** @type {ReturnType<typeof Share> | undefined} */ #sharing; // while something is wanted

  /** @type {any} */ #hiding;
  #hidden = 0; // 1: this tab was hidden for PAUSE_MS; 2: for HIDDEN_MS more
  #syncing = false;
  #user = 0; // grows when the user is another one
  #doubts = 0; // how often it is being found out at this moment whether the user is another one
  #gone = false; // between pagehide and pageshow; whoever opens is here
  /** @type {any} */ #closing;

  /**
   * @param {string | URL | Options} [url] where the server is, or all options
   * @param {Options} [options]
   */
  constructor(url, options) {
    super();
    const named = typeof url === 'string' || url instanceof URL;
    const {
      server = HOME,
      token,
      countHidden = true,
      share = true,
      storage,
    } = /** @type {Options} */ ({ ...Headcount.defaults, ...(named ? { ...options, server: url } : (url ?? options)) });
    // A server that renders this page has no location. There nothing is ever connected.
    this.#base = new URL(server, /** @type {any} */ (globalThis.location ?? 'http://x'));
    this.#base.protocol = this.#base.protocol.replace('ws', 'http');
    if (!this.#base.protocol.startsWith('http')) throw new TypeError(`Headcount: not a server: ${server}`);
    if (!this.#base.pathname.endsWith('/')) this.#base.pathname += '/';
    this.#token = token;
    this.#keep = storage !== 'none';
    this.#share = share && this.#keep; // each tab is somebody else then
    this.#countHidden = countHidden;
    this.#listen();
  }

  /** Listens to what happens to the page, until close(). */
  #listen() {
    this.#closing = new AbortController();
    this.#gone = false;
    // The document alone hears "resume" and "prerenderingchange".
    const on = (/** @type {string} */ type, /** @type {() => void} */ listener) =>
      (type.includes('re') ? globalThis.document : globalThis)?.addEventListener?.(type, listener, {
        signal: this.#closing.signal,
      });
    // A closed connection lets the browser keep the page for "back". It must not
    // send a leave: the server waits a moment (leave-grace) after a mere close, so
    // a reload or a click to the next page does not make the count fall and rise.
    on('pagehide', () => {
      this.#gone = true;
      this.#part();
    });
    // Browsers differ in what they tell a page that comes back. Any of these means that it is here.
    for (const type of 'pageshow online visibilitychange resume focus prerenderingchange'.split(' '))
      on(type, () => {
        const seen = !globalThis.document?.hidden;
        if (seen || type === 'pageshow') this.#gone = false;
        this.countHidden = this.#countHidden;
        if (seen || type === 'online') this.#tell(true);
      });
    this.countHidden = this.#countHidden;
  }

  get state() {
    return this.#state;
  }

  /** Replaces the token. A new connection uses it: at once if it is another user's, for all tabs that ask for tokens by a function. */
  set token(/** @type {Token | undefined} */ token) {
    this.#token = token;
    this.#identify();
  }

  /** Whether a tab that was hidden for a minute is still counted. */
  get countHidden() {
    return this.#countHidden;
  }

  set countHidden(yes) {
    this.#countHidden = yes;
    clearTimeout(this.#hiding);
    const hide = (/** @type {number} */ times) => {
      this.#hidden = times;
      this.#changed();
      if (globalThis.document?.hidden && times < 2)
        this.#hiding = setTimeout(hide, PAUSE_MS + times * AWAY_MS, times + 1);
    };
    hide(globalThis.document?.hidden ? this.#hidden : 0);
  }

  /**
   * Makes the user present on a page. Returns a function that takes this join
   * back; the user leaves when the last join of the page is taken back.
   * @param {string} page
   * @returns {() => void}
   */
  join(page) {
    this.#admit([page], '*'); // the whole site is no page
    return this.#add(this.#joins, { page });
  }

  /**
   * Ends presence on a page, however often it was joined. Without a page it ends
   * presence on all pages.
   * @param {string} [page]
   */
  leave(page) {
    for (const join of this.#joins) if (page === undefined || join.page === page) this.#joins.delete(join);
    this.#changed();
  }

  /**
   * Calls callback with the counter now, when the count is known, and on every
   * change, without being counted. '*' is the whole site. Returns a function
   * that ends it. Without a callback it returns an iterator: a loop that is slow
   * gets the newest count of each page.
   * @overload
   * @param {string | string[]} pages
   * @param {(counter: Counter) => void} callback
   * @returns {() => void}
   */
  /**
   * @overload
   * @param {string | string[]} pages
   * @returns {AsyncGenerator<Counter, void, void>}
   */
  /**
   * @param {string | string[]} pages
   * @param {(counter: Counter) => void} [callback]
   */
  watch(pages, callback) {
    const all = [...new Set([pages].flat())];
    this.#admit(all);
    return this.#subscribe(all, callback);
  }

  /**
   * Calls callback with the number of the user's unread notifications, now when
   * known and on every change; without a callback it returns an iterator.
   * @overload
   * @param {(count: number) => void} callback
   * @returns {() => void}
   */
  /**
   * @overload
   * @returns {AsyncGenerator<number, void, void>}
   */
  /** @param {(count: number) => void} [callback] */
  unread(callback) {
    return this.#subscribe([''], callback);
  }

  /**
   * What a <live-count> does. It counts the user on this page, by the path of its
   * canonical address, and goes along when a script changes the address. Calls
   * callback with the counter, and with undefined while that is not known. Returns
   * a function that ends it.
   * @param {(counter: Counter | undefined) => void} callback
   * @param {{page?: string, watch?: boolean}} [how] page: another name, which stays; watch: without being counted
   * @returns {() => void}
   */
  here(callback, { page, watch } = {}) {
    const end = new AbortController();
    const name = page ?? address();
    let early = () => {}; // the join must not wait for the other file
    try {
      if (name) early = watch || name === '*' ? this.watch(name, () => {}) : this.join(name);
    } catch {} // the other file has a name for it, or says what is wrong with it
    load(LIVE).then(({ attend, place }) => {
      attend(this, callback, page, watch, () => address() ?? place(pageFrom()), end.signal);
      early();
    });
    return () => {
      end.abort();
      early();
    };
  }

  /** Sets the user's unread notifications to zero. */
  read() {
    this.#read = true;
    this.#changed();
  }

  /**
   * Has the user follow a page: its changes are unread notifications from now on. The
   * promise of a call that is refused is rejected, with `status`.
   * @param {string} page
   * @returns {Promise<void>}
   */
  follow(page) {
    return this.#call('PUT', page);
  }

  /**
   * Ends that, and drops what is unread of the page.
   * @param {string} page
   * @returns {Promise<void>}
   */
  unfollow(page) {
    return this.#call('DELETE', page);
  }

  /**
   * The pages that the user follows.
   * @returns {Promise<string[]>}
   */
  follows() {
    return this.#call('GET');
  }

  /**
   * A call about a counter that lasts, or about what the user follows: one page, or all.
   * @type {(method: string, topic?: any) => Promise<any>}
   */
  #call(method, topic) {
    return this.lend(part(MORE).then(({ call }) => call), method, topic);
  }

  /**
   * A counter that lasts. Its changes need a rule on the server that opens them to
   * everyone; the promise of one that is refused is rejected, with `status`.
   * @param {string} key
   * @returns {CounterHandle}
   */
  counter(key) {
    const topic = COUNTER + key;
    const known = this.#known;
    return {
      key,
      get value() {
        return known.get(topic)?.value.value;
      },
      watch: /** @type {any} */ ((/** @type {any} */ callback) => this.watch(topic, callback)),
      add: () => this.#call('PUT', topic),
      remove: () => this.#call('DELETE', topic),
      increment: () => this.#call('POST', topic),
    };
  }

  /**
   * Lets another file of the client, which may be yet to be loaded, make a call as the user of this moment.
   * @type {(call: any, method: string, name: string) => Promise<any>}
   */
  async lend(call, method, name) {
    const user = this.#user;
    const sharing = !this.#doubts && this.#sharing;
    const [token, make] = await Promise.all([ask(this.#token), call]);
    // Somebody has logged in since then, perhaps in another tab: this is not done in the name of the wrong user.
    if (sharing && !sharing._same(token)) {
      this.#identify();
      throw new Error('Headcount: another user');
    }
    // This tab's seed may be younger than that of the tab with the connection, which is about to know the user's id.
    const leads = () => this.#sharing?._leads();
    if (method && !token && this.#sharing && !leads() && idOf(this.#base, this.#keep)?.startsWith(SEED))
      await timely(
        new Promise((known) => this.addEventListener('state', () => (leads() || this.#state === 'open') && known(0))),
      ).catch(() => {});
    // An answer to the user before says nothing of this one.
    const hear = (/** @type {Frame} */ frame) => user === this.#user && this.#hear({ frame });
    return make(method, name, this.#base, token, this.#keep, token ? () => {} : idOf, hear);
  }

  /** Leaves every page and ends the connection, until open(). Other tabs may be those of a user who has logged out: they ask. */
  close() {
    this.#sharing?._doubt();
    this.#leave();
    this.#closing.abort();
    clearTimeout(this.#hiding);
    this.#become('closed');
  }

  /** Goes on after close(), with all that is wanted. */
  open() {
    if (this.#state !== 'closed') return;
    this.#become('idle');
    this.#listen();
  }

  /** @type {(keys: string[], callback?: (value: any) => void) => any} */
  #subscribe(keys, callback) {
    if (!callback) return this.#iterate(keys);
    const watch = { _keys: keys, _callback: callback };
    for (const key of keys) {
      const known = this.#known.get(key);
      queueMicrotask(() => {
        // Not if the watch has ended, or if a newer value was faster.
        if (known && this.#watches.has(watch) && this.#known.get(key) === known) call(callback, known.value);
      });
    }
    return this.#add(this.#watches, watch);
  }

  /** @type {<T>(set: Set<T>, what: T) => () => void} */
  #add(set, what) {
    set.add(what);
    this.#changed();
    return () => {
      set.delete(what);
      this.#changed();
    };
  }

  get #joined() {
    return new Set([...this.#joins].map(({ page }) => page));
  }

  get #watched() {
    return new Set([...this.#watches].flatMap(({ _keys }) => _keys));
  }

  async *#iterate(/** @type {string[]} */ keys) {
    yield* (await part(MORE)).iterate(this, (/** @type {any} */ callback) => this.#subscribe(keys, callback));
  }

  // ---- what is wanted

  /**
   * Refuses at once what the server would refuse later, so that the caller sees why.
   * @param {string[]} topics
   * @param {string} [reserved] a further name that no page has
   */
  #admit(topics, reserved = '') {
    for (const topic of topics) {
      const name = topic.replace?.(COUNTER, '');
      if (!name || [...name].length > 128 || name === reserved || /^(-|\.\.?)$/.test(name))
        throw new TypeError(`Headcount: not a page: ${topic}`);
    }
    if (new Set(['', ...this.#joined, ...this.#watched, ...topics]).size > MAX_PAGES + 1)
      throw new RangeError('Headcount: full'); // MAX_PAGES
  }

  /** Sends all changes of this turn of the event loop together. */
  #changed() {
    if (this.#syncing || !globalThis.location) return;
    this.#syncing = true;
    queueMicrotask(() => {
      this.#syncing = false;
      // A page that the browser has made in advance may never be opened.
      if (this.#state === 'closed' || this.#gone || /** @type {any} */ (globalThis.document)?.prerendering) return;
      for (const key of this.#known.keys())
        if (!this.#joined.has(key) && !this.#watched.has(key)) this.#known.delete(key);
      if (this.#sharing) this.#tell();
      else if (this.#joins.size || this.#watches.size || this.#read) this.#meet();
    });
  }

  /** Tells the tab with the connection what this one wants. wake: at once; none: nothing any more. */
  #tell(wake = false, none = false) {
    const token = this.#token;
    const wants = {
      join: none || (this.#hidden > 1 && !this.#countHidden) ? [] : [...this.#joined],
      watch: none ? [] : [...this.#joined, ...this.#watched].filter(Boolean),
      hidden: this.#hidden,
      unread: !none && this.#watched.has(''),
      read: this.#read,
      token: typeof token === 'string' && token,
    };
    if (this.#sharing?._leads()) this.#read = false;
    this.#sharing?._tell(wants, wake);
  }

  /** Takes part in a connection. */
  #meet() {
    this.#sharing = Share(this.#base, this.#keep, this.#share, () => this.#token, {
      _tell: () => this.#tell(),
      _hear: (word) => this.#hear(word),
    });
    this.#sharing._meet();
  }

  /** Gives up the connection without a leave. */
  #part() {
    const sharing = this.#sharing;
    if (!sharing) return;
    this.#sharing = undefined;
    sharing._end();
    this.#become('waiting');
  }

  /** Gives up the connection, and everybody sees that the user has left. What is known is the user's. */
  #leave() {
    this.#tell(false, true);
    this.#part();
    for (const [topic, { value }] of this.#known) {
      if (topic === '') this.#learn('', 'unread', 0);
      else if (value.mine) this.#learn(topic, 'counter', { ...value, mine: false });
    }
    this.#known.clear();
    this.#read = false;
    this.#user++;
    emit(this, 'user');
  }

  /** Finds out whether the user is another one now. Then a new connection begins, and other tabs find out, too. */
  async #identify() {
    const sharing = this.#sharing;
    this.#doubts++;
    // While there is no token, the user stays.
    if (sharing && !(await ask(this.#token).then(sharing._same, () => true)) && sharing === this.#sharing) {
      sharing._doubt();
      this.#leave();
    }
    this.#doubts--;
    this.#changed();
  }

  // ---- what is received

  /** @param {Word} word from the tab that has the connection */
  #hear({ to, full, state, frame, link, user }) {
    // Not every browser says that a hidden page is seen again.
    if (this.#hidden && !globalThis.document?.hidden) this.countHidden = this.#countHidden;
    // A token that another tab has put into the storage, or taken out, may reach this tab later than the message.
    if (user) for (const ms of [0, LATE_MS]) setTimeout(() => this.#identify(), ms);
    if (full) {
      this.#part(); // the shared connection has no room for these pages: open another one
      this.#share = false;
      return this.#changed();
    }
    if (to) this.#read = false;
    if (state) this.#become(state);
    if (!frame) return;
    const { type, ...said } = frame;
    if (type === 'count' || type === 'counter') this.#count(type, said, link);
    if (type === 'unread' && this.#known.get('')?.value !== said.count) this.#learn('', type, said.count);
    if (type === 'follow') emit(this, type, said);
    if (type === 'error') {
      const topic = refused(said);
      emit(this, 'error', said);
      for (const watch of this.#watches) watch._keys = watch._keys.filter((key) => key !== topic);
      if (topic) this.leave(topic);
    }
  }

  /** @type {(type: string, counter: Frame, link: unknown) => void} */
  #count(type, counter, link) {
    const { page, key, version } = counter;
    const topic = page ?? COUNTER + key;
    const known = this.#known.get(topic);
    if (known) {
      const old = known.value;
      // With version 0-0 the server says that it knows nothing about this page. That
      // stays true when a server without stored counts started again and nobody came
      // back. It is believed if it is the first count that another link sends. A counter
      // that lasts has it after it was deleted.
      const forgotten = version === '0-0' && (key || known.link !== link);
      if (version.localeCompare(old.version, [], { numeric: true }) < 0 && !forgotten) return;
      known.link = link;
      if (JSON.stringify(counter) === JSON.stringify(old)) return;
    }
    this.#learn(topic, type, counter, link);
  }

  /** @type {(key: string, type: string, value: any, link?: unknown) => void} */
  #learn(key, type, value, link) {
    const watches = [...this.#watches].filter(({ _keys }) => _keys.includes(key));
    if (!watches.length && !this.#joined.has(key)) return; // it is for another tab, or a leave was faster
    this.#known.set(key, { value, link });
    emit(this, type, value);
    // One of them may have ended others, or closed everything.
    for (const watch of watches)
      if (this.#watches.has(watch) && this.#known.get(key)?.value === value) call(watch._callback, value);
  }

  #become(/** @type {State} */ state) {
    if (state === this.#state) return;
    this.#state = state;
    emit(this, 'state', state);
  }
}

/**
 * Calls a callback. If it throws, the console shows the error and the other callbacks still run.
 * @template T
 * @param {(value: T) => void} callback
 * @param {T} value
 */
function call(callback, value) {
  try {
    callback(value);
  } catch (error) {
    reportError(error);
  }
}

/** @type {Record<string, Headcount>} */ const shared = {}; // one for each server and storage that elements name
/** @type {string | undefined} */ let canonical; // the page's canonical address, and ...
let seenAt = ''; // ... the path under which it was first seen

/** What the page's own name is made of, if not of its path. */
const pageFrom = () =>
  Headcount.defaults.pageFrom ??
  /** @type {HTMLElement | null} */ (document.querySelector('script[data-page-from]'))?.dataset.pageFrom;

/**
 * The page's own name: the path of its canonical address, readable ("/café", not
 * "/caf%C3%A9"). When a script has changed the path and left the canonical address
 * as it was, that is the address of another page. Names that are made of more than
 * paths are for live.js.
 */
function address() {
  let path = location.pathname;
  const href = /** @type {HTMLLinkElement | null} */ (document.querySelector('link[rel~=canonical][href]'))?.href;
  if (pageFrom() || href?.includes('?')) return;
  if (href !== canonical) {
    canonical = href;
    seenAt = path;
  }
  try {
    if (href && seenAt === path) path = new URL(href).pathname;
    return decodeURI(path);
  } catch {
    return path;
  }
}

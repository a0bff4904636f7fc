// @ts-check
// Headcount in the browser: who is here, live.
//
//   <script type="module" src="https://headcount.example.com/-/headcount.js"></script>
//   <live-count singular="# person is reading this" other="# people are reading this"></live-count>
//   <unread-bell></unread-bell>
//   <live-counter counter="views:42"></live-counter> views <like-button counter="likes:42"></like-button>
//
// or, by hand:
//
//   import { Headcount } from 'https://headcount.example.com/-/headcount.js';
//   const headcount = new Headcount();
//   headcount.join('pricing');
//   headcount.watch(['pricing', '*'], ({ page, count }) => console.log(page, count));
//
// No dependency, no eval and no inline style, so it runs under a
// Content-Security-Policy as strict as "default-src 'self'".
//
// There are two parts. A Headcount knows what its tab wants (wants). A Hub has the
// connection and serves all Headcounts that share it: those of one tab, and those
// of all tabs of a site. One Headcount holds a Web Lock and has the Hub. The others
// talk to the Hub over a BroadcastChannel. They always send everything they want,
// so a lost message or a new Hub needs no special treatment. Without Web Locks
// (plain http on the network) each Headcount has its own Hub.
//
// What elements show, and what else only some pages need, is in other files, which
// are loaded while the connection is made, or later: live.js, bell.js, list.js, more.js and
// rescue.js.

const HEARTBEAT_MS = 15_000; // until the server's welcome names another interval
const PATIENCE_MS = 5_000; // how long a heartbeat may stay without an answer
const ANSWER_MS = 10_000; // how long a token or a file may take
const BACKOFF_MS = 1_000; // the first retry comes within this time, ...
const BACKOFF_SOON_MS = 2_000; // ... those of about a minute within this, since a restart takes seconds, ...
const SOON = 60;
// a page that is refused asks less often before that: the browser's console has lines of each attempt
const SOON_REFUSED = 6;
const BACKOFF_MAX_MS = 30_000; // ... and the later ones within this
const STEADY_MS = 10_000; // after a connection of this length, earlier failures do not count
const MAX_PAGES = 100; // the server's bound for one connection
const GRACE_MS = 2_000; // how long the wants of a tab that vanished are kept: the tab may just reload
const SILENCE_MS = 3_000; // when the tab with the connection is silent this long, it sleeps and another tab takes over
const IDLE_MS = 5_000; // a connection of which nothing has been wanted for this long is closed
const PAUSE_MS = 5_000; // a tab that was hidden this long gets no counts, ...
const AWAY_MS = 50_000; // ... and after this and as long again it is not counted, if countHidden is false

const HOME = new URL('..', import.meta.url); // the server that this file came from

// What can be watched is a topic: a page, or a counter that lasts, whose topic is its
// key after a tab, which no page has.
const COUNTER = '\t';

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
 * @property {{(callback: (counter: CounterValue) => void): () => void, (): AsyncGenerator<CounterValue, void, void>}}
 *   watch like Headcount.watch
 * @property {number | undefined} value the newest value, while something watches the counter
 * @property {() => Promise<CounterValue>} add makes the user a member
 * @property {() => Promise<CounterValue>} remove
 * @property {() => Promise<CounterValue>} increment adds one
 */
/** @typedef {'idle' | 'connecting' | 'open' | 'waiting' | 'refused' | 'closed'} State */
/** @typedef {string | (() => string | Promise<string>)} Token */
/**
 * @typedef {object} Options
 * @property {string | URL} [server] where the server is; default where this file came from
 * @property {'none'} [storage] none: neither cookie nor storage; the user has an id as long as this document lives
 * @property {Token} [token] says who the user is, if the server requires tokens; a function is called for every
 *   connection
 * @property {boolean} [countHidden] false: a tab that was hidden for a minute is not counted; default true
 * @property {'path' | 'url' | 'hash' | `query:${string}`} [pageFrom] what the page's own name is made of: path (the
 *   default), url, hash, or query:p; in Headcount.defaults alone
 * @property {boolean} [share] false: no other tab uses this connection; default true
 */
/**
 * join is a part of watch.
 * @typedef {{
 *   join: string[], watch: string[], hidden: number, unread: boolean, read: boolean, token?: string | false,
 * }} Wants
 */
/** @typedef {any} Frame */
/**
 * @typedef {{
 *   state?: State, frame?: Frame, link?: unknown, to?: number, full?: boolean, lead?: string, from?: number,
 *   wants?: Wants, wake?: boolean, id?: string, user?: boolean,
 * }} Word
 */

/** @type {(target: EventTarget, type: string, detail: unknown) => unknown} */
const emit = (target, type, detail) => target.dispatchEvent(new CustomEvent(type, { detail }));

/** The rest of this module, which only some pages need. */
const more = () => import('./more.js');

/** @type {Promise<typeof import('./live.js')> | undefined} */ let lively;
/**
 * What elements show. It is loaded until that succeeds; browsers remember a failure, so the next attempt has another
 * name.
 */
const live = () =>
  (lively ??= (async () => {
    for (let retry = ''; ; retry += '?1')
      try {
        return await import(`./live.js${retry}`);
      } catch {
        await new Promise((again) => setTimeout(again, BACKOFF_MAX_MS));
      }
  })());

/**
 * Fails when there is no answer: a network that loses requests without a word says nothing for minutes.
 * @type {<T>(answer: T) => Promise<Awaited<T>>}
 */
const timely = (answer) => Promise.race([answer, new Promise((_, fail) => setTimeout(fail, ANSWER_MS, 'timeout'))]);

const ask = (/** @type {Token | undefined} */ token) => timely(typeof token === 'function' ? token() : token);

/** @type {(pages: Iterable<string>, without: Set<string> | undefined) => string[]} */
const minus = (pages, without) => [...pages].filter((page) => !without?.has(page));

/** The topic that an error frame is about, if the server refused the frame because of it. */
const refused = (/** @type {Frame} */ { code, page, counter }) => (counter ? COUNTER + counter : code && page);

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
  // a key is a topic, or '' for unread
  /** @type {Set<{keys: string[], callback: (value: any) => void}>} */ #watches = new Set();
  #read = false; // "read" must still be sent
  // What is known about the wanted topics and unread: at most MAX_PAGES + 1 entries.
  /** @type {Map<string, {value: any, link?: unknown}>} */ #known = new Map();
  /** @type {State} */ #state = 'idle';

  // How the connection is shared.
  /** @type {string | undefined} */ #user; // whose connection this is, by the token
  #id = 0; // our name among the tabs that share, until this page goes
  /** @type {ReturnType<typeof Hub> | undefined} */ #hub; // set if this tab has the connection
  /** @type {((word: Word) => void) | undefined} */ #post; // sends to the other tabs, if tabs share
  /** @type {AbortController | undefined} */ #sharing; // ends the sharing and releases the locks
  /** @type {any} */ #silence;

  /** @type {any} */ #hiding;
  #hidden = 0; // 1: this tab was hidden for PAUSE_MS; 2: for HIDDEN_MS more
  #syncing = false;
  #gone = false; // between pagehide and pageshow
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
    const on = (/** @type {string} */ type, /** @type {() => void} */ listener) =>
      (type === 'resume' ? globalThis.document : globalThis)?.addEventListener?.(type, listener, {
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
    for (const type of ['pageshow', 'online', 'visibilitychange', 'resume', 'focus'])
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

  /**
   * Replaces the token. A new connection uses it: at once if it is another user's, for all tabs that ask for tokens by
   * a function.
   */
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
    this.#admit([page], /^(-|\.\.?|\*)$/);
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
    this.#admit([]);
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
    live().then(({ attend, place }) => {
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
    this.#admit([]);
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
    return this.#follow('PUT', page);
  }

  /**
   * Ends that, and drops what is unread of the page.
   * @param {string} page
   * @returns {Promise<void>}
   */
  unfollow(page) {
    return this.#follow('DELETE', page);
  }

  /**
   * The pages that the user follows.
   * @returns {Promise<string[]>}
   */
  follows() {
    return this.#follow('GET');
  }

  /** @type {(method: string, page?: string) => Promise<any>} */
  async #follow(method, page) {
    return (await more()).follow(this, method, page);
  }

  /**
   * A counter that lasts. Its changes need a rule on the server that opens them to
   * everyone; the promise of one that is refused is rejected, with `status`.
   * @param {string} key
   * @returns {CounterHandle}
   */
  counter(key) {
    const topic = COUNTER + key;
    const change = (/** @type {string} */ method) => async () => this.lend((await more()).change, method, key);
    const known = this.#known;
    return {
      key,
      get value() {
        return known.get(topic)?.value.value;
      },
      watch: /** @type {any} */ ((/** @type {any} */ callback) => this.watch(topic, callback)),
      add: change('PUT'),
      remove: change('DELETE'),
      increment: change('POST'),
    };
  }

  /**
   * Lets another file of the client make a call as this user.
   * @type {(call: any, method: string, name: string) => Promise<any>}
   */
  async lend(call, method, name) {
    const token = await ask(this.#token);
    // This tab's seed may be younger than that of the tab with the connection, which is about to know the user's id.
    if (method && !token && this.#sharing && !this.#hub && idOf(this.#base, this.#keep)?.startsWith(SEED))
      await timely(
        new Promise((known) => this.addEventListener('state', () => (this.#hub || this.#state === 'open') && known(0))),
      ).catch(() => {});
    return call(method, name, this.#base, token, this.#keep, token ? () => {} : idOf, (/** @type {Frame} */ frame) =>
      this.#hear({ frame }),
    );
  }

  /**
   * Leaves every page and ends the connection, until open(). Other tabs may be those of a user who has logged out: they
   * ask.
   */
  close() {
    this.#post?.({ user: true });
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
    const watch = { keys, callback };
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
    return new Set([...this.#watches].flatMap(({ keys }) => keys));
  }

  async *#iterate(/** @type {string[]} */ keys) {
    yield* (await more()).iterate(this, (callback) => this.#subscribe(keys, callback));
  }

  // ---- what is wanted

  /**
   * Refuses at once what the server would refuse later, so that the caller sees why.
   * @param {string[]} topics
   * @param {RegExp} [reserved]
   */
  #admit(topics, reserved = /^(-|\.\.?)$/) {
    for (const topic of topics) {
      const name = topic.replace?.(COUNTER, '');
      if (!name || [...name].length > 128 || reserved.test(name))
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
      if (this.#state === 'closed' || this.#gone) return;
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
    if (this.#hub) {
      this.#read = false;
      if (!this.#hub._set(this.#id, wants, wake)) this.#hear({ full: true });
    } else this.#post?.({ from: this.#id, wants, wake });
  }

  /** Finds out which tab has the connection. This tab takes it if no other tab has it. */
  async #meet() {
    const { signal } = (this.#sharing = new AbortController());
    this.#id = Math.random();
    this.#user = undefined;
    const locks = this.#share && navigator.locks;
    if (!locks) return this.#lead();
    let name = `headcount ${this.#base} `;
    /** @type {BroadcastChannel} */ let channel;
    try {
      const user = userOf(await ask(this.#token));
      if (signal.aborted) return;
      this.#user = user;
      if (user === undefined) return this.#lead();
      name += user; // tabs of different users have nothing to share
      channel = new BroadcastChannel(name);
    } catch {
      // There is no token now, or the browser forbids storage, and channels with it.
      return signal.aborted || this.#lead();
    }

    const atEnd = (/** @type {any} */ step) => signal.addEventListener('abort', step);
    /** @type {(lock: string, held: () => unknown, options?: LockOptions) => Promise<unknown>} */
    const hold = (lock, held, options = { signal }) =>
      locks.request(
        lock,
        options,
        () => new Promise((release) => (signal.aborted || held() ? release(0) : atEnd(release))),
      );
    atEnd(() => channel.close());
    /** @type {(options?: LockOptions) => unknown} */
    const lead = (options) =>
      hold(
        name,
        () => {
          this.#lead();
          channel.postMessage({ lead: this.#id });
        },
        options,
      ).catch(() => {
        // Another tab took the lock because this tab was asleep. Wait for the lock again.
        if (signal.aborted) return;
        this.#hub?._hangUp();
        this.#hub = undefined;
        if (!options) lead();
        this.#tell();
      });
    /** @type {Set<number>} */ const known = new Set(); // the tabs that want something from this Hub
    channel.onmessage = ({ data }) => {
      const { from, wants, wake } = data ?? {}; // any script of this origin may have sent it
      if (!from) return (this.#hub && !data?.user) || this.#hear(data ?? {});
      if (!this.#hub || !wants?.join?.map || !wants.watch?.map) return;
      // The lock becomes free when that tab is gone, for whatever reason.
      if (!known.has(from))
        hold(name + from, () => {
          this.#hub?._lost(from);
          return known.delete(from);
        }).catch(() => {});
      known.add(from);
      const full = !this.#hub._set(from, wants, wake);
      channel.postMessage({ to: from, full, ...this.#hub._news() });
    };
    // Some browsers have Web Locks that are never granted. Then this tab has a connection of its own.
    const alone = setTimeout(() => {
      channel.close();
      this.#lead();
    }, SILENCE_MS);
    atEnd(() => clearTimeout(alone));
    // This tab holds the lock as long as it exists.
    hold(name + this.#id, () => {
      if (this.#hub) return true; // too late
      clearTimeout(alone);
      this.#post = (word) => {
        channel.postMessage(word);
        if (!this.#hub) this.#silence ??= setTimeout(lead, SILENCE_MS, { steal: true });
      };
      lead();
      this.#tell();
      // Somebody who only looks notices, too, when the tab with the connection sleeps.
      const look = setInterval(() => this.#hub || this.#hidden || this.#tell(), PATIENCE_MS);
      atEnd(() => clearInterval(look));
    }).catch(() => {
      // Some contexts have Web Locks but forbid their use.
      clearTimeout(alone);
      return signal.aborted || this.#hub || this.#lead();
    });
  }

  /** From now on this tab has the connection. */
  #lead() {
    this.#heard();
    /** @type {ReturnType<typeof Hub>} */
    const hub = (this.#hub = Hub(
      this.#base,
      this.#keep,
      () => this.#token,
      (token) => this.#same(token),
      (word) => {
        this.#hear(word);
        this.#post?.(word);
      },
    ));
    this.#tell();
  }

  /** Gives up the connection without a leave. */
  #part() {
    this.#heard();
    this.#hub?._hangUp();
    this.#hub = this.#post = undefined;
    if (this.#sharing) this.#become('waiting');
    this.#sharing?.abort();
    this.#sharing = undefined;
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
    emit(this, 'user', undefined);
  }

  #same(/** @type {string | undefined} */ token) {
    return (this.#user ??= userOf(token)) === userOf(token);
  }

  /** Finds out whether the user is another one now. Then a new connection begins, and other tabs find out, too. */
  async #identify() {
    const sharing = this.#sharing;
    const same = await ask(this.#token).then(
      (token) => this.#same(token),
      () => true,
    );
    if (sharing && sharing === this.#sharing && !same) {
      this.#post?.({ user: true });
      this.#leave();
    }
    this.#changed();
  }

  #heard() {
    this.#silence = clearTimeout(this.#silence);
  }

  // ---- what is received

  /** @param {Word} word from the tab that has the connection */
  #hear({ lead, to, full, state, frame, link, id, user }) {
    if (to && to !== this.#id) return;
    this.#heard();
    // Not every browser says that a hidden page is seen again.
    if (this.#hidden && !globalThis.document?.hidden) this.countHidden = this.#countHidden;
    if (id) idOf(this.#base, this.#keep, id);
    // A token that another tab has put into the storage, or taken out, may reach this tab later than the message.
    if (user) for (const ms of [0, BACKOFF_MS]) setTimeout(() => this.#identify(), ms);
    if (lead) this.#tell();
    if (full) {
      this.#part(); // the shared connection has no room for these pages: open another one
      this.#share = false;
      return this.#changed();
    }
    if (to) this.#read = false;
    if (state) this.#become(state);
    switch (frame?.type) {
      case 'count':
      case 'counter':
        return this.#count(frame, link);
      case 'unread':
        if (this.#known.get('')?.value !== frame.count) this.#learn('', 'unread', frame.count);
        return;
      case 'error': {
        const { type, ...error } = frame;
        const topic = refused(error);
        emit(this, type, error);
        if (!topic) return;
        for (const watch of this.#watches) watch.keys = watch.keys.filter((key) => key !== topic);
        this.leave(topic);
      }
    }
  }

  /** @type {(frame: Frame, link: unknown) => void} */
  #count({ type, ...counter }, link) {
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
    const watches = [...this.#watches].filter(({ keys }) => keys.includes(key));
    if (!watches.length && !this.#joined.has(key)) return; // it is for another tab, or a leave was faster
    this.#known.set(key, { value, link });
    emit(this, type, value);
    for (const watch of watches) call(watch.callback, value);
  }

  #become(/** @type {State} */ state) {
    if (state === this.#state) return;
    this.#state = state;
    emit(this, 'state', state);
  }
}

/**
 * Has the connection for all tabs that share it.
 * @param {URL} base
 * @param {boolean} keep whether the user's id may be stored
 * @param {() => Token | undefined} getToken
 * @param {(token: string | undefined) => boolean} same whether a token is of the user whose connection this is
 * @param {(word: Word) => void} say
 */
function Hub(base, keep, getToken, same, say) {
  /** @type {State} */ let state = 'idle';
  /** @type {Frame} */ let unread; // the newest number, for tabs that come later
  /** @type {string | undefined} */ let issued; // the anonymous id
  /** @type {Map<number, Omit<Wants, 'join' | 'watch'> & {join: Set<string>, watch: Set<string>}>} */ const members =
    new Map();
  // a fixed token that the server called expired; another attempt with it is useless
  /** @type {unknown} */ let expired;
  let toRead = false; // "read" must still be sent

  // Usually there is one link. There are two while a server that shuts down sends
  // us to another: the old link stays until the new one is welcome, so the user
  // stays counted.
  /** @type {Set<Link>} */ const links = new Set();
  let dialing = false;
  /** @type {boolean | undefined} */ let over;
  /** @type {any} */ let retry; // timer of the next attempt
  /** @type {any} */ let idle; // timer that closes a connection of which nothing is wanted
  let attempt = 0;
  let failures = 0; // attempts in a row that the server did not welcome
  /** @type {any} */ let welcomed; // when the last link was made over which a server welcomed us
  let refusal = ''; // why the server does not let this page in
  /** @type {any} */ let rescue; // the file of that name, once it is loaded

  const all = (/** @type {'join' | 'watch'} */ kind) =>
    new Set([...members.values()].flatMap((member) => [...member[kind]]));

  /** The fixed token for the next attempt: a tab that has been open for long may have one that has expired. */
  const given = () => {
    const tokens = [...members.values()].map(({ token }) => token).filter((token) => token && token !== expired);
    return tokens[failures % tokens.length];
  };

  const wanted = () => toRead || all('watch').size > 0 || [...members.values()].some((m) => m.unread);

  /** Sends over a link the difference between what is wanted and what was sent before. */
  const sync = (/** @type {Link} */ link) => {
    if (!link._open) return;
    const paused = [...members.values()].every((member) => member.hidden);
    if (paused !== link._paused) link._send({ type: paused ? 'pause' : 'resume' });
    link._paused = paused;
    const joined = all('join');
    const pages = all('watch');
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

    clearTimeout(idle);
    idle = setTimeout(() => {
      if (wanted()) return;
      unread = 0; // nobody tells us of its changes from now on
      links.forEach((link) => link._end());
    }, IDLE_MS);
  };
  const syncAll = () => links.forEach(sync);

  /** Determines the state and reports it if it has changed. */
  const show = () => {
    /** @type {State} */
    const now = [...links].some((link) => link._welcome)
      ? 'open'
      : refusal
        ? 'refused'
        : links.size || dialing
          ? 'connecting'
          : wanted()
            ? 'waiting'
            : 'idle';
    if (now !== state && !over) say({ state: (state = now), id: now === 'open' ? issued : '' });
  };

  /** Full jitter: a random time up to a bound, so that many clients do not come back at once. */
  const backoff = () =>
    Math.random() *
    (attempt++ ? (attempt < (refusal ? SOON_REFUSED : SOON) ? BACKOFF_SOON_MS : BACKOFF_MAX_MS) : BACKOFF_MS);

  /** Plans the next attempt after ms. It replaces an earlier plan. */
  const later = (/** @type {number} */ ms) => {
    clearTimeout(retry);
    retry =
      wanted() &&
      setTimeout(() => {
        retry = 0;
        dial();
      }, ms);
  };

  /** Whether there is a link, open or connecting, that the server has not asked to end. */
  const served = () => dialing || [...links].some((link) => !link._draining);

  const dial = async () => {
    // The token has expired: the tab that has a newer token continues.
    if (over || served() || !wanted() || (expired && !given())) return show();
    dialing = true;
    show();
    /** @type {Link | undefined} */ let link;
    try {
      const address = new URL('-/ws', base);
      address.protocol = address.protocol.replace('http', 'ws');
      address.search = base.search; // a page of the server's own names a site
      const token = getToken();
      const fixed = typeof token !== 'function' && given();
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
      // a server that was restarted learns it from us
      if (welcomed) address.searchParams.set('back', /** @type {any} */ (performance.now() - welcomed));
      let Socket = globalThis.WebSocket;
      if (failures) {
        // Another file, which is seldom needed, finds the cause and an alternative.
        rescue ||= await timely(import(`./rescue.js?${failures}`)).catch(() => {});
        const found = await rescue?.default(address, failures, refusal, links);
        if (typeof found === 'string') {
          if (found !== refusal) say({ frame: { type: 'error', code: 'refused', message: (refusal = found) } });
        } else if (found !== undefined) {
          refusal = '';
          Socket = found ?? Socket;
        }
      }
      if (over) return;
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
        },
      }));
      failures++; // the welcome sets it to 0
      links.add(link);
    } catch (cause) {
      say({ frame: { type: 'error', code: 'connect', message: `${cause}` } });
    }
    dialing = false;
    if (!link) later(backoff());
    show();
  };

  // ---- what the server sends

  const heard = (/** @type {Link} */ link, /** @type {Frame} */ frame, /** @type {unknown} */ token) => {
    const { type, code } = frame;
    const again = () => {
      link._joined.clear();
      link._subscribed.clear();
      sync(link);
    };
    if (type === 'welcome') {
      link._welcome = true;
      failures = 0;
      refusal = '';
      welcomed = link._made;
      link._heartbeat = frame.heartbeat_ms || link._heartbeat;
      setTimeout(() => links.has(link) && (attempt = 0), STEADY_MS);
      issued = frame.id;
      if (issued) idOf(base, keep, issued);
      links.forEach((other) => other === link || other._end());
      return show();
    }
    if (type === 'reconnect') {
      link._draining = true;
      return retry || served() || later(frame.after_ms); // once it is planned, another frame changes nothing
    }
    if (type === 'unread') unread = frame;
    const topic = refused(frame);
    if (topic) {
      // The whole frame was refused. Say everything again without that topic.
      for (const { join, watch } of members.values()) {
        join.delete(topic);
        watch.delete(topic);
      }
      again();
    }
    if (code === 'rate_limited') setTimeout(again, GRACE_MS);
    if (code === 'token_expired') {
      if (token) console.error(frame.message); // it is fixed: nobody is asked for a new one
      expired = token;
    }
    // The answer to a heartbeat, and frames of later servers, only show that the server lives.
    say({ frame, link: link._made });
  };

  return {
    /** For a tab that comes later. */
    _news: () => ({ state, frame: unread, id: issued }),

    /**
     * Takes what one tab wants. wake: somebody looks at the tab, or the network is
     * back, so the next attempt comes at once. Returns false if there is no room.
     * @type {(id: number, wants: Wants, wake?: boolean) => boolean}
     */
    _set(id, wants, wake) {
      const { join, watch } = wants;
      const old = members.get(id);
      // an older release sends them apart
      members.set(id, { ...wants, join: new Set(join), watch: new Set([...join, ...watch]) });
      if (all('watch').size > MAX_PAGES && members.size > 1) {
        // Its earlier wants stay until the tab is gone from this Hub, which is soon.
        old ? members.set(id, old) : members.delete(id);
        return false;
      }
      // Values that other tabs have received are sent again for a tab that comes later.
      const fresh = minus(watch, old?.watch);
      for (const link of links) link._subscribe(fresh.filter((p) => link._joined.has(p) || link._subscribed.has(p)));
      if (wants.unread && !old?.unread && unread) say({ frame: unread });
      toRead ||= wants.read;
      syncAll();
      if (wake) {
        links.forEach((link) => link._probe());
        if (!links.size) {
          clearTimeout(retry);
          attempt = retry = 0;
        }
      }
      // A link that the server asked to end has its own plan for the next attempt.
      if (!retry && !links.size) dial();
      return true;
    },

    /** @param {number} id of a tab that vanished: the tab may come back under another id */
    _lost(id) {
      setTimeout(() => {
        members.delete(id);
        syncAll();
      }, GRACE_MS);
    },

    _hangUp() {
      over = true;
      links.forEach((link) => link._end());
      clearTimeout(retry);
    },
  };
}

/** @typedef {ReturnType<typeof Link>} Link */
/**
 * One WebSocket, or its replacement. It checks that the server still answers.
 * @param {WebSocket} socket
 * @param {{_opened(): void, _frame(frame: Frame): void, _ended(): void}} events
 */
function Link(socket, events) {
  let ended = false;
  let probing = false;
  /** @type {any} */ let timer;
  const wait = (/** @type {() => void} */ then, /** @type {number} */ ms) => {
    clearTimeout(timer);
    timer = setTimeout(then, ms);
  };
  const listen = (/** @type {string} */ type, /** @type {(event: any) => void} */ listener) =>
    socket.addEventListener(type, (event) => ended || listener(event));
  const heard = () => {
    probing = false;
    if (!ended) wait(link._probe, link._heartbeat);
  };
  const link = {
    _made: performance.now(), // also its name: different for every link
    _open: false,
    _paused: false, // it brings no counts, because no tab can be seen
    _welcome: false, // the server has greeted us
    _draining: false, // the server asked us to go elsewhere
    /** @type {Set<string>} */ _joined: new Set(), // the pages that were joined over this link
    /** @type {Set<string>} */ _subscribed: new Set(),
    _heartbeat: HEARTBEAT_MS,

    _send(/** @type {object} */ frame) {
      if (link._open && !ended) socket.send(JSON.stringify(frame));
    },
    _subscribe(/** @type {string[]} */ all, type = 'subscribe') {
      const send = (/** @type {string} */ kind, /** @type {string[]} */ names) => {
        // Each frame stays under the 4,096 bytes that the server accepts: a name has at most 512.
        for (let i = 0; i < names.length; i += 7) link._send({ type, [kind]: names.slice(i, i + 7) });
      };
      send('pages', all.filter((topic) => topic[0] !== COUNTER));
      send('counters', all.filter((topic) => topic[0] === COUNTER).map((topic) => topic.slice(1)));
      for (const topic of all) link._subscribed[type === 'subscribe' ? 'add' : 'delete'](topic);
    },
    /**
     * Asks for a sign of life, and closes the link if none comes. Silence alone does
     * not close it, because the timers of a tab in the background may fire a minute
     * late. Only an unanswered heartbeat does.
     */
    _probe() {
      if (!link._open || probing) return;
      probing = true;
      link._send({ type: 'heartbeat' });
      wait(link._end, PATIENCE_MS);
    },
    /** Closes without waiting for the other end, which may be gone. */
    _end() {
      if (ended) return;
      ended = true;
      clearTimeout(timer);
      socket.close();
      events._ended();
    },
  };
  wait(link._end, HEARTBEAT_MS + PATIENCE_MS);
  listen('open', () => {
    link._open = true;
    heard();
    events._opened();
  });
  listen('message', ({ data }) => {
    let frame;
    try {
      frame = JSON.parse(data);
    } catch {}
    if (frame) events._frame(frame);
    heard();
  });
  listen('close', link._end);
  listen('error', link._end); // Chromium says no more when a Content-Security-Policy forbids the socket
  return link;
}

/**
 * Whose a token is: '' of nobody, and undefined if it does not say that.
 * @type {(token: string | undefined) => string | undefined}
 */
const userOf = (token) => {
  try {
    return !token ? '' : JSON.parse(atob(token.split('.')[1].replace(/-/g, '+').replace(/_/g, '/'))).sub;
  } catch {}
};

/**
 * What a seed begins with. It takes the place of the user's id until the server has issued one, so that all
 * calls of a first visit are those of one user.
 */
const SEED = '0'.repeat(22) + '.';
const seed = () =>
  SEED + [...crypto.getRandomValues(new Uint8Array(22))].map((byte) => (byte % 36).toString(36)).join('');

/** The shape of ids and seeds: anything else in the storage is another script's, and no server knows it. */
const ID = /^[\w-]{22}\.[\w-]{22}$/;

/** @type {Record<string, string>} */ const memory = {}; // ids and seeds, by whether they may be stored and where

/**
 * The anonymous id that a server issued, or a seed; with an id, keeps it. On the server's own
 * origin a cookie says who we are, and this returns nothing, unless the browser keeps no cookies: the page is in
 * a frame of another site, or the user forbids them.
 * @param {URL} base of the server: others may be on other paths of its origin
 * @param {boolean} keep whether it may be stored
 * @param {any} [id]
 */
function idOf({ origin, pathname }, keep, id) {
  const old = `headcount_id ${origin}`; // once of all servers there
  const key = old + pathname.slice(0, -1);
  const own = keep + key;
  const fresh = () => memory[`false${key}`] ?? seed(); // who consents to storage stays who they were
  const issued = ID.test(id);
  if (issued) memory[own] = id;
  try {
    if (keep && location.origin === origin) {
      const kept = () => document.cookie.includes('headcount_new');
      // Another tab may write one at the same time. Each has its own name, so both are kept, and the first one counts.
      if (!kept()) document.cookie = `headcount_new_${seed().slice(-8)}=${fresh()};path=/;max-age=60;samesite=lax`;
      if (kept()) return;
    }
  } catch {}
  try {
    if (issued && keep) localStorage[key] = id;
    if (keep) {
      // What this document has presented counts more than another tab's seed.
      const stored = [localStorage[key], localStorage[old]].find((one) => ID.test(one));
      if (stored && !(memory[own] && stored.startsWith(SEED))) memory[own] = stored;
      return (localStorage[key] = memory[own] ??= fresh());
    }
  } catch {}
  return (memory[own] ??= fresh());
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

// ---- the elements

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

/** @type {new () => HTMLElement} */
const Element = /** @type {any} */ (globalThis.HTMLElement ?? class {});

/** What all elements share: attributes that are properties as well, and changes that are gathered. */
export class Shell extends Element {
  /** @type {number | undefined} */ #value;
  /** @type {AbortController | undefined} */ #end;
  #due = false;

  /** The number shown, or undefined. */
  get count() {
    return this.#value;
  }

  connectedCallback() {
    // What a library has set before this file was loaded hides the properties.
    for (const [name, value] of Object.entries(this)) {
      if (!properties.has(name)) continue;
      delete (/** @type {any} */ (this)[name]);
      /** @type {any} */ (this)[name] = value;
    }
    this.#changed();
  }

  disconnectedCallback() {
    this.#changed();
  }

  attributeChangedCallback(
    /** @type {string} */ _,
    /** @type {string | null} */ before,
    /** @type {string | null} */ now,
  ) {
    if (before !== now) this.#changed();
  }

  /** All changes of a turn of the event loop are one: to another page without a leave in between. */
  #changed() {
    this.#value = undefined;
    if (this.#due) return;
    this.#due = true;
    queueMicrotask(() => {
      this.#due = false;
      const before = this.#end;
      this.#end = this.isConnected ? new AbortController() : undefined;
      if (this.#end) this.begin(this.#end.signal, (value) => (this.#value = value));
      before?.abort();
    });
  }

  /**
   * Shows what the attributes say, until the signal.
   * @param {AbortSignal} signal
   * @param {(value: number | undefined) => void} keep takes the number shown
   */
  begin(signal, keep) {}
}

/** @type {Set<string>} */ const properties = new Set(); // of all elements

/**
 * Defines an element, with a property for each attribute: under its own name, and in
 * camel case. Libraries set properties where there are some.
 * @param {string} tag
 * @param {any} element
 * @param {string[]} attributes
 */
export function define(tag, element, attributes) {
  for (const name of attributes) {
    const only = name === 'count-hidden'; // true unless it says false; the other flags are false unless they are there
    const flag = only || name === 'watch' || name === 'increment';
    for (const property of [name, name.replace(/-(.)/, (_, letter) => letter.toUpperCase())]) {
      properties.add(property);
      Object.defineProperty(element.prototype, property, {
        configurable: true,
        get() {
          const text = this.getAttribute(name);
          return flag ? (only || text !== null) && !/^false$/i.test(text) : (text ?? '');
        },
        set(value) {
          if (value == null || (value === false && !only)) this.removeAttribute(name);
          else this.setAttribute(name, value === true ? '' : value);
        },
      });
    }
  }
  if (globalThis.customElements && !customElements.get(tag)) customElements.define(tag, element);
}

// Another value of one of these draws the element anew; those of SAID are read when they are needed.
const DRAWN =
  'page watch server storage count-hidden key counter increment format min zero one singular two few many other'.split(
    ' ',
  );
const SAID = 'label announce refused all none failed'.split(' ');

/**
 * An element that shows a live number. What it shows is in other files.
 * @param {() => Promise<{default: (parts: import('./live.js').Parts) => void}>} load its own part
 */
const late = (load) =>
  class extends Shell {
    static observedAttributes = DRAWN;

    /** @type {Headcount | undefined} */ #at; // the client that counts for it now

    /** @type {Shell['begin']} */
    begin(signal, keep) {
      const { page, server, storage, watch, countHidden } = /** @type {any} */ (this);
      const complain = (/** @type {any} */ error) => console.error(error.message);
      let early = () => {};
      this.#at = undefined;
      try {
        const headcount = (this.#at = Headcount.at({ server, storage }));
        if (!countHidden) headcount.countHidden = false;
        if (load === live) {
          const stay = () => headcount.here(() => {}, { page: page || undefined, watch });
          early = stay();
          // The element may be put back soon, or another connection count the user: until then the user stays.
          signal.addEventListener('abort', () => {
            if (!this.isConnected || this.#at !== headcount) setTimeout(stay(), GRACE_MS);
          });
        }
        Promise.all([live(), load()])
          .then(([{ draw }, part]) => {
            if (!signal.aborted) part.default(draw(this, headcount, signal, keep));
            early();
          })
          .catch(complain);
      } catch (error) {
        complain(error);
      }
      signal.addEventListener('abort', early);
    }
  };

/**
 * <live-count> shows how many people are on this page, the reader included.
 *
 *   singular="# person is reading" other="# people are reading"   the whole sentence, by
 *                       the plural of the page's language: zero, singular (or one), two, few, many, other
 *   min="5"             shows nothing under it
 *   page="…"            another page than this one
 *   watch               show the count without being counted
 *   server="https://…"  where the server is, if it is not where this file came from
 *   storage="none"      neither cookie nor storage: each tab is somebody else
 *   format="full"       "1,234" instead of "1.2K"; a sentence has that on large screens
 *   announce="…"        what a screen reader says, at most once a minute; {count} is the number, off is silence
 *   count-hidden="false"  a user who hides this tab for a minute is not counted
 *
 * The element shows its content until the first count is there. ::part(count) styles
 * the number, together with ::part(offline) while there is no connection,
 * ::part(refused) while the server does not let this page in, and ::part(stale) while
 * it cannot be sure that the count is right. An event `count` follows each change.
 */
export const LiveCount = late(live);

/**
 * <unread-bell> shows how many notifications of the user are unread; a click
 * opens the list of the newest, which are read one by one or all.
 *
 *   label="…"     what the button is called; default "Notifications"
 *   announce="…"  as above
 *   all="…" none="…" failed="…"  words of the list: that all are to be read, that there
 *                 is nothing new, that it could not be loaded
 *
 * Its content takes the place of the bell. Style it with ::part(button),
 * ::part(count), --headcount-badge and --headcount-badge-ink, and the list with
 * ::part(list), ::part(item), ::part(all), --headcount-list and --headcount-list-ink.
 * An event `unread` follows each change, `read` what was read: its detail is the page,
 * or null for all. An event `open` comes before the list; prevent it to show your own.
 */
export const UnreadBell = late(() => import('./bell.js'));

for (const [tag, element] of /** @type {[string, any][]} */ ([
  ['live-count', LiveCount],
  ['unread-bell', UnreadBell],
  ['live-counter', late(more)],
  ['like-button', late(more)],
  ['follow-button', late(more)],
]))
  define(tag, element, [...DRAWN, ...SAID]);

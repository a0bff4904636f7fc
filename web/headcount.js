// Headcount in the browser: who is here, live.
//
//   <script type="module" src="https://headcount.example.com/-/headcount.js"></script>
//   <live-count></live-count> people are reading this.
//
// or, by hand:
//
//   import { Headcount } from 'https://headcount.example.com/-/headcount.js';
//   const headcount = new Headcount();
//   headcount.join('pricing');
//   headcount.watch(['pricing', '*'], ({ page, count }) => console.log(page, count));
//
// One file, no build step, no dependency, no eval and no inline style, so it
// runs under a Content-Security-Policy as strict as "default-src 'self'".

const HEARTBEAT_MS = 15_000; // until the server's welcome names its own
const PATIENCE_MS = 5_000; // how long a heartbeat may stay without an answer
const BACKOFF_MS = 1_000; // the first retry comes within this time, ...
const BACKOFF_MAX_MS = 30_000; // ... the later ones within twice as long each, up to this
const STEADY_MS = 10_000; // a connection that stood this long forgives earlier failures
const HANDOVER_MAX_MS = 60_000; // the longest wait that a reconnect frame may ask for
const MAX_PAGES = 100; // the server's bound for one connection
const MAX_PAGE_LENGTH = 128; // code points
const MAX_FRAME_BYTES = 4_096; // the server closes a connection that sends more
const ANNOUNCE_MS = 10_000; // least time between two announcements to a screen reader

/**
 * Orders two versions "incarnation-sequence": negative when a is older than b.
 * What is no version is as old as can be.
 */
export function compareVersions(a, b) {
  const parse = (v) => (/^(\d+)-(\d+)$/.exec(v) ?? [0, 0, 0]).slice(1).map(BigInt);
  const [incA, seqA] = parse(a);
  const [incB, seqB] = parse(b);
  if (incA !== incB) return incA < incB ? -1 : 1;
  return seqA === seqB ? 0 : seqA < seqB ? -1 : 1;
}

/**
 * A connection to a Headcount server, kept up until close().
 *
 * Events: `state` (detail: the new state), `count` (detail: the counter),
 * `unread` (detail: the number), `error` (detail: {code, message, page}).
 *
 * States: `idle` (nothing was asked for yet), `connecting`, `open`, `waiting`
 * (for the next attempt), `closed`.
 */
export class Headcount extends EventTarget {
  /** The one connection that all <live-count> elements of this document share. */
  static get shared() {
    return (shared ??= new Headcount());
  }

  #base;
  #token;
  #expired; // the fixed token that the server called expired: not worth another attempt

  #joined = new Map(); // page -> the joins that are not taken back, as Symbols
  #watchers = new Map(); // page -> callbacks
  #unreadWatchers = new Set();
  #counts = new Map(); // page -> {counter, link}; only pages joined or watched, so at most MAX_PAGES
  #unread;
  #read = false; // "read" is still to be sent

  // Usually one link. Two while a server that shuts down hands us over: the
  // old one goes on until the new one is welcome, so that nobody misses us.
  #links = new Set();
  #dialing = false;
  #retry; // timer of the next attempt
  #attempt = 0;
  #syncing = false;
  #hidden = false; // between pagehide and pageshow
  #closed = false;
  #state = 'idle';
  #listening = new AbortController();

  /**
   * @param {string} [url] where the server is; by default where this module came from
   * @param {{token?: string | (() => string | Promise<string>)}} [options] token: who the
   *   user is, when the server wants to know; a function is asked again for every connection
   */
  constructor(url = new URL(import.meta.url).origin, { token } = {}) {
    super();
    this.#base = new URL(url, globalThis.location?.href);
    this.#base.protocol = this.#base.protocol.replace(/^ws/, 'http');
    if (!/^https?:$/.test(this.#base.protocol)) throw new TypeError(`Headcount: ${url} is no http address`);
    if (!this.#base.pathname.endsWith('/')) this.#base.pathname += '/';
    this.#token = token;
    this.#listen();
  }

  get state() {
    return this.#state;
  }

  /** Replaces the token; the next connection uses it. */
  set token(token) {
    this.#token = token;
    if (this.#expired !== undefined && this.#expired !== token) {
      this.#expired = undefined;
      this.#wake();
    }
  }

  /**
   * Makes the user present on a page. Returns a function that takes this join
   * back; the user leaves when the last join of the page is taken back.
   */
  join(page) {
    checkPage(page);
    if (page === '*') throw new TypeError('Headcount: * can be watched, not joined');
    this.#admit([page]);
    const join = Symbol(page);
    if (!this.#joined.has(page)) this.#joined.set(page, new Set());
    this.#joined.get(page).add(join);
    this.#changed();
    return () => {
      const joins = this.#joined.get(page);
      if (joins?.delete(join) && joins.size === 0) this.leave(page);
    };
  }

  /** Ends presence on a page, however often it was joined; without a page, on all. */
  leave(page) {
    if (page === undefined) this.#joined.clear();
    else this.#joined.delete(page);
    this.#changed();
  }

  /**
   * Calls callback({page, count, updated_at, version, stale}) now, when the
   * count is known, and on every change, without being counted. pages is one
   * page or several; '*' is the whole site. Returns a function that ends it.
   */
  watch(pages, callback) {
    pages = [...new Set([pages].flat())];
    pages.forEach(checkPage);
    if (typeof callback !== 'function') throw new TypeError('Headcount: watch needs a callback');
    this.#admit(pages);
    const watcher = (counter) => callback(counter);
    for (const page of pages) {
      if (!this.#watchers.has(page)) this.#watchers.set(page, new Set());
      this.#watchers.get(page).add(watcher);
      const known = this.#counts.get(page)?.counter;
      queueMicrotask(() => {
        // Unless it ended, or a newer count was faster.
        if (!known || !this.#watchers.get(page)?.has(watcher)) return;
        if (this.#counts.get(page)?.counter === known) call(watcher, known);
      });
    }
    this.#changed();
    return () => {
      for (const page of pages) {
        const watchers = this.#watchers.get(page);
        if (watchers?.delete(watcher) && watchers.size === 0) this.#watchers.delete(page);
      }
      this.#changed();
    };
  }

  /** Calls callback(count) with the user's unread notifications, now when known and on every change. */
  unread(callback) {
    if (typeof callback !== 'function') throw new TypeError('Headcount: unread needs a callback');
    this.#admit([]);
    const watcher = (count) => callback(count);
    this.#unreadWatchers.add(watcher);
    const known = this.#unread;
    queueMicrotask(() => {
      if (known === undefined || !this.#unreadWatchers.has(watcher)) return;
      if (this.#unread === known) call(watcher, known);
    });
    this.#changed();
    return () => void this.#unreadWatchers.delete(watcher);
  }

  /** Sets the user's unread notifications to zero. */
  read() {
    this.#admit([]);
    this.#read = true;
    this.#changed();
  }

  /** Leaves every page and ends the connection for good. */
  close() {
    if (this.#closed) return;
    this.#joined.clear();
    for (const link of this.#links) this.#sync(link);
    this.#closed = true;
    this.#listening.abort();
    this.#watchers.clear();
    this.#unreadWatchers.clear();
    this.#counts.clear();
    this.#hangUp();
  }

  // ---- what is wanted, and what the server was told of it

  /** Refuses what the server would refuse, where the caller can still see why. */
  #admit(pages) {
    if (this.#closed) throw new Error('Headcount: the connection was closed');
    const all = new Set([...this.#joined.keys(), ...this.#watchers.keys(), ...pages]);
    if (all.size > MAX_PAGES) throw new RangeError(`Headcount: more than ${MAX_PAGES} pages on one connection`);
  }

  #wants(page) {
    return this.#joined.has(page) || this.#watchers.has(page);
  }

  get #wanted() {
    return this.#joined.size + this.#watchers.size + this.#unreadWatchers.size > 0 || this.#read;
  }

  /** Tells the server, in one go, what this turn of the event loop changed. */
  #changed() {
    if (this.#syncing || this.#closed) return;
    this.#syncing = true;
    queueMicrotask(() => {
      this.#syncing = false;
      if (this.#closed) return;
      for (const page of this.#counts.keys()) if (!this.#wants(page)) this.#counts.delete(page);
      for (const link of this.#links) this.#sync(link);
      this.#dialIfNeeded();
    });
  }

  /** Sends a link the difference between what is wanted and what it was told. */
  #sync(link) {
    if (!link.open) return;
    const join = [...this.#joined.keys()].filter((p) => !link.joined.has(p));
    // A join subscribes too. What is explicitly subscribed outlives a leave.
    const subscribe = [...this.#watchers.keys()].filter((p) => !link.subscribed.has(p) && !this.#joined.has(p));
    const leave = [...link.joined].filter((p) => !this.#joined.has(p));
    const unsubscribe = [...link.subscribed].filter((p) => !this.#wants(p));

    const add = () => {
      for (const page of join) link.send({ type: 'join', page });
      for (const pages of frames(subscribe)) link.send({ type: 'subscribe', pages });
      join.forEach((p) => link.joined.add(p));
      subscribe.forEach((p) => link.subscribed.add(p));
    };
    const remove = () => {
      for (const page of leave) link.send({ type: 'leave', page });
      for (const pages of frames(unsubscribe)) link.send({ type: 'unsubscribe', pages });
      leave.forEach((p) => link.joined.delete(p));
      unsubscribe.forEach((p) => link.subscribed.delete(p));
    };
    // Who moves from one page to another joins before leaving, or the whole
    // site's count would fall and rise; unless that would pass the server's bound.
    const both = new Set([...link.joined, ...link.subscribed, ...join, ...subscribe]);
    const steps = both.size <= MAX_PAGES ? [add, remove] : [remove, add];
    steps.forEach((step) => step());

    if (this.#read) {
      link.send({ type: 'read' });
      this.#read = false;
    }
  }

  // ---- connecting

  #listen() {
    const on = (type, listener) =>
      globalThis.addEventListener?.(type, listener, { signal: this.#listening.signal });
    // A closed connection lets the browser keep the page for "back". It must not
    // send a leave: the server waits a moment (leave-grace) after a mere close, so
    // a reload or a click to the next page does not make the count fall and rise.
    on('pagehide', () => {
      this.#hidden = true;
      this.#hangUp();
    });
    on('pageshow', () => {
      if (!this.#hidden) return;
      this.#hidden = false;
      this.#attempt = 0;
      this.#dialIfNeeded();
    });
    on('online', () => this.#wake());
    on('visibilitychange', () => {
      if (globalThis.document?.visibilityState === 'visible') this.#wake();
    });
  }

  /** Someone looks, or the network is back: no reason to wait longer. */
  #wake() {
    for (const link of this.#links) link.probe();
    if (this.#links.size > 0 || this.#state !== 'waiting') return;
    this.#attempt = 0;
    this.#dialIfNeeded(true);
  }

  #hangUp() {
    clearTimeout(this.#retry);
    this.#retry = undefined;
    for (const link of [...this.#links]) link.end();
    this.#show();
  }

  /** Whether some link is there, or on its way, that is not about to go. */
  get #served() {
    return this.#dialing || [...this.#links].some((link) => !link.draining);
  }

  #dialIfNeeded(now = false) {
    if (now) {
      clearTimeout(this.#retry);
      this.#retry = undefined;
    }
    // A link that hands us over has its own plan for the next attempt.
    if (this.#retry === undefined && this.#links.size === 0) this.#dial();
  }

  async #dial() {
    if (this.#closed || this.#hidden || this.#served || !this.#wanted) return this.#show();
    if (this.#expired !== undefined) return this.#show(); // the token's setter goes on from here
    this.#dialing = true;
    this.#show();
    let link;
    try {
      const address = await this.#address();
      if (this.#closed || this.#hidden) return;
      link = new Link(address, {
        opened: () => {
          this.#sync(link);
          this.#show();
        },
        frame: (frame) => this.#frame(link, frame),
        ended: () => this.#ended(link),
      });
      this.#links.add(link);
    } catch (cause) {
      this.#emit('error', { code: 'connect', message: String(cause?.message ?? cause) });
    } finally {
      this.#dialing = false;
      if (!link && !this.#closed && !this.#hidden) this.#later(this.#backoff());
      this.#show();
    }
  }

  async #address() {
    const address = new URL('-/ws', this.#base);
    address.protocol = address.protocol.replace(/^http/, 'ws');
    const token = typeof this.#token === 'function' ? await this.#token() : this.#token;
    if (token) address.searchParams.set('token', token);
    // On the server's own origin the cookie says who we are. On another one the
    // browser does not send it, so the id that the server issued goes along.
    else if (globalThis.location?.origin !== this.#base.origin) {
      const id = ids.get(this.#base.origin);
      if (id) address.searchParams.set('id', id);
    }
    return address;
  }

  /** Full jitter: anything between nothing and a bound that doubles, so that a crowd comes back spread out. */
  #backoff() {
    const bound = Math.min(BACKOFF_MAX_MS, BACKOFF_MS * 2 ** this.#attempt);
    this.#attempt++;
    return Math.random() * bound;
  }

  /** Makes the next attempt after ms, instead of an earlier plan. */
  #later(ms) {
    clearTimeout(this.#retry);
    this.#retry = setTimeout(() => {
      this.#retry = undefined;
      this.#dial();
    }, ms);
  }

  #ended(link) {
    this.#links.delete(link);
    clearTimeout(link.steady);
    if (!this.#closed && !this.#hidden && !this.#served) this.#later(this.#backoff());
    this.#show();
  }

  /** Works out the state and says so when it is another one. */
  #show() {
    const links = [...this.#links];
    let state = 'waiting';
    if (this.#closed) state = 'closed';
    else if (links.some((link) => link.welcome)) state = 'open';
    else if (links.length > 0 || this.#dialing) state = 'connecting';
    else if (!this.#wanted) state = 'idle';
    if (state === this.#state) return;
    this.#state = state;
    this.#emit('state', state);
  }

  // ---- what the server says

  #frame(link, frame) {
    switch (frame.type) {
      case 'welcome':
        return this.#welcome(link, frame);
      case 'count':
        return this.#count(link, frame);
      case 'unread':
        if (frame.count === this.#unread) return;
        this.#unread = frame.count;
        this.#emit('unread', frame.count);
        for (const watcher of [...this.#unreadWatchers]) call(watcher, frame.count);
        return;
      case 'reconnect': {
        if (link.draining) return;
        link.draining = true;
        const ms = Number.isFinite(frame.after_ms) ? frame.after_ms : 0;
        if (!this.#served) this.#later(Math.min(Math.max(ms, 0), HANDOVER_MAX_MS));
        return;
      }
      case 'error':
        return this.#error(link, frame);
    }
    // A heartbeat's answer, and what later servers may say, is a sign of life and no more.
  }

  #welcome(link, { id, heartbeat_ms }) {
    link.welcome = true;
    if (heartbeat_ms > 0) link.heartbeat = heartbeat_ms;
    link.steady = setTimeout(() => (this.#attempt = 0), STEADY_MS);
    if (typeof id === 'string') ids.set(this.#base.origin, id);
    for (const other of [...this.#links]) if (other !== link) other.end();
    this.#show();
  }

  #count(link, { type, ...counter }) {
    const { page, count, version } = counter;
    if (!this.#wants(page)) return; // overtaken by a leave or unsubscribe
    const known = this.#counts.get(page);
    if (known) {
      const order = compareVersions(version, known.counter.version);
      // Version 0-0 is the server's word that it knows nothing of this page,
      // which is true for good when a server without a memory started again and
      // nobody came back. As the first word of another link it is believed.
      const forgotten = version === '0-0' && known.link !== link;
      if (order < 0 && !forgotten) return;
      known.link = link;
      if (order === 0 && count === known.counter.count && !counter.stale === !known.counter.stale) return;
    }
    this.#counts.set(page, { counter, link });
    this.#emit('count', counter);
    for (const watcher of [...(this.#watchers.get(page) ?? [])]) call(watcher, counter);
  }

  #error(link, { code, message, page }) {
    this.#emit('error', { code, message, page });
    switch (code) {
      case 'bad_page':
        // The whole frame was refused. Say everything again without that page.
        this.#joined.delete(page);
        this.#watchers.delete(page);
        link.forget();
        this.#changed();
        return;
      case 'rate_limited':
        setTimeout(() => {
          link.forget();
          this.#changed();
        }, this.#backoff() + BACKOFF_MS);
        return;
      case 'token_expired':
        if (typeof this.#token !== 'function') this.#expired = this.#token;
    }
  }

  #emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

/** One WebSocket, and whether there is still someone at its other end. */
class Link {
  open = false;
  welcome = false; // the server has greeted us
  draining = false; // the server asked us to go elsewhere
  joined = new Set(); // pages, as this link's server was told
  subscribed = new Set();
  heartbeat = HEARTBEAT_MS;
  steady;
  #socket;
  #events;
  #timer;
  #probing = false;
  #ended = false;

  constructor(address, events) {
    this.#events = events;
    this.#socket = new WebSocket(address.href, 'headcount.v1');
    this.#timer = setTimeout(() => this.end(), this.heartbeat + PATIENCE_MS);
    this.#on('open', () => {
      this.open = true;
      this.#heard();
      events.opened();
    });
    this.#on('message', ({ data }) => {
      let frame;
      try {
        frame = JSON.parse(data);
      } catch {}
      if (frame) events.frame(frame);
      this.#heard();
    });
    this.#on('close', () => this.end());
  }

  #on(type, listener) {
    this.#socket.addEventListener(type, (event) => this.#ended || listener(event));
  }

  send(frame) {
    if (this.open && !this.#ended) this.#socket.send(JSON.stringify(frame));
  }

  forget() {
    this.joined.clear();
    this.subscribed.clear();
  }

  #heard() {
    this.#probing = false;
    clearTimeout(this.#timer);
    if (!this.#ended) this.#timer = setTimeout(() => this.probe(), this.heartbeat);
  }

  /**
   * Asks for a sign of life, and gives up without one. Only an unanswered
   * question counts, not silence: the timers of a tab in the background may
   * fire a minute late.
   */
  probe() {
    if (!this.open || this.#probing) return;
    this.#probing = true;
    this.send({ type: 'heartbeat' });
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.end(), PATIENCE_MS);
  }

  /** Closes without waiting for the other end, which may be gone. */
  end() {
    if (this.#ended) return;
    this.#ended = true;
    clearTimeout(this.#timer);
    this.#socket.close();
    this.#events.ended();
  }
}

/** The anonymous ids that servers issued, by the server's origin. */
const ids = {
  memory: new Map(), // for browsers that forbid storage
  get(origin) {
    try {
      return localStorage.getItem(`headcount_id ${origin}`) ?? this.memory.get(origin);
    } catch {
      return this.memory.get(origin);
    }
  },
  set(origin, id) {
    this.memory.set(origin, id);
    try {
      localStorage.setItem(`headcount_id ${origin}`, id);
    } catch {}
  },
};

/** The rules that cost nothing to check here; the server knows the others. */
function checkPage(page) {
  if (typeof page !== 'string') throw new TypeError('Headcount: a page is a string');
  if (page === '' || [...page].length > MAX_PAGE_LENGTH)
    throw new TypeError(`Headcount: a page has 1 to ${MAX_PAGE_LENGTH} characters`);
  if (['-', '.', '..'].includes(page)) throw new TypeError(`Headcount: ${page} is a reserved page`);
}

/** Splits pages so that each frame stays well under the server's bound. */
function* frames(pages) {
  const room = MAX_FRAME_BYTES - 64;
  const size = (page) => new TextEncoder().encode(JSON.stringify(page)).length + 1;
  let part = [];
  let used = 0;
  for (const page of pages) {
    if (used + size(page) > room) {
      yield part;
      part = [];
      used = 0;
    }
    part.push(page);
    used += size(page);
  }
  if (part.length > 0) yield part;
}

/** A callback that throws spoils nobody else's, and still shows in the console. */
function call(callback, value) {
  try {
    callback(value);
  } catch (error) {
    if (globalThis.reportError) reportError(error);
    else queueMicrotask(() => Promise.reject(error));
  }
}

// ---- <live-count>

let shared;
let sheet;

/** The page's own name: the path of its canonical address, readable ("/café", not "/caf%C3%A9"). */
function canonicalPage() {
  let path = location.pathname;
  try {
    const canonical = document.querySelector('link[rel~="canonical"][href]');
    if (canonical) path = new URL(canonical.href).pathname;
    return decodeURI(path);
  } catch {
    return path;
  }
}

function readable(number, language) {
  try {
    return number.toLocaleString(language || undefined);
  } catch {
    return number.toLocaleString(); // the document's language is none
  }
}

/**
 * <live-count> shows how many people are on this page, the reader included.
 *
 *   page="…"      another page than this one
 *   watch         show the count without being counted
 *   announce="…"  what a screen reader says now and then; {count} is the number
 *
 * Its content is shown until the first count is there. Style the number with
 * ::part(count), and while it is not live with ::part(offline), when the server
 * itself cannot be sure with ::part(stale). An event `count` follows each change.
 */
export class LiveCount extends (globalThis.HTMLElement ?? class {}) {
  static observedAttributes = ['page', 'watch'];

  #number = document.createElement('span');
  #slot = document.createElement('slot');
  #status = document.createElement('span');
  #counter;
  #stop;
  #spoken;
  #quiet;

  constructor() {
    super();
    if (!sheet) {
      sheet = new CSSStyleSheet();
      sheet.replaceSync(`
        [part] { font-variant-numeric: tabular-nums; }
        [part~=offline], [part~=stale] { opacity: .45; }
        [role] { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
      `);
    }
    this.#number.setAttribute('part', 'count offline');
    this.#slot.textContent = '–';
    this.#number.append(this.#slot);
    this.#status.setAttribute('role', 'status'); // a polite live region
    const root = this.attachShadow({ mode: 'open' });
    root.adoptedStyleSheets = [sheet];
    root.append(this.#number, this.#status);
  }

  /** The number shown, or undefined. */
  get count() {
    return this.#counter?.count;
  }

  connectedCallback() {
    const headcount = Headcount.shared;
    const page = this.getAttribute('page') || canonicalPage();
    const online = () => this.#number.part.toggle('offline', headcount.state !== 'open');
    const undo = [];
    try {
      if (page !== '*' && !this.hasAttribute('watch')) undo.push(headcount.join(page));
      undo.push(headcount.watch(page, (counter) => this.#show(counter)));
    } catch (error) {
      console.error(error.message); // a page that cannot be; the rest of the document is not to blame
    }
    headcount.addEventListener('state', online);
    undo.push(() => headcount.removeEventListener('state', online));
    online();
    this.#stop = () => undo.forEach((step) => step());
  }

  disconnectedCallback() {
    this.#stop?.();
    this.#stop = undefined;
    clearTimeout(this.#quiet);
    this.#quiet = undefined;
  }

  attributeChangedCallback(name, before, after) {
    if (!this.#stop || before === after) return;
    this.disconnectedCallback();
    if (name === 'page') {
      this.#number.replaceChildren(this.#slot);
      this.#counter = this.#spoken = undefined;
    }
    this.connectedCallback();
  }

  #show(counter) {
    this.#counter = counter;
    this.#number.textContent = readable(counter.count, this.closest('[lang]')?.lang);
    this.#number.part.toggle('stale', counter.stale === true);
    this.dispatchEvent(new CustomEvent('count', { detail: counter }));
    if (this.#spoken === undefined) this.#spoken = counter.count; // read where it stands, like any text
    else this.#announce();
  }

  /** Says the newest number at once, then keeps quiet for a while. */
  #announce() {
    if (this.#quiet !== undefined) return;
    const news = this.#counter.count !== this.#spoken;
    const text = this.getAttribute('announce') ?? '{count} here now';
    this.#status.textContent = news ? text.replaceAll('{count}', this.#number.textContent) : '';
    this.#spoken = this.#counter.count;
    if (!news) return;
    this.#quiet = setTimeout(() => {
      this.#quiet = undefined;
      this.#announce();
    }, ANNOUNCE_MS);
  }
}

if (globalThis.customElements && !customElements.get('live-count')) customElements.define('live-count', LiveCount);

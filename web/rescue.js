// @ts-check
// headcount.js loads this file when it could not open a WebSocket. The file finds
// out whether the server is there and lets this page in, and what the author of the
// page can do if not. It replaces the WebSocket where a proxy or another program
// between browser and server blocks WebSockets.

// of a page that is held by PUTs: a hold lasts three presence timeouts, 21 s unless the server has other settings
const RENEW_MS = 7_000;
const UNREAD_MS = 15_000;
const POLL_MS = 3_000;
const ANSWER_MS = 5_000; // how long an answer may take
const STREAMS = 4; // a browser has six connections to a server of HTTP/1.1; further pages are polled
const TABS = 3; // so many tabs have one stream each where each tab has its own connection
const LEASE_MS = 10_000; // how long a tab has a stream that it does not ask for again
const RETURN_MS = 25_000; // after this time the client tries a WebSocket again
const LATELY_MS = 90_000; // where WebSockets were found blocked this lately, one that fails is blocked again
const LONGEST = 4_000; // characters of a query: many proxies take 8 KB of address, and some less
const COUNTERS = 'api/v1/counters';
const COUNTER = '\t'; // a counter's topic is its key after this; a page is its own topic

/**
 * heard: since it was opened or lost it has brought something.
 * @typedef {{source: EventSource, joins: boolean, before?: EventSource, renewal: any, heard: boolean}} Stream
 */

// connections whose server answered over HTTP when a WebSocket had failed, and that are trying a WebSocket again
/** @type {WeakSet<object>} */ const answered = new WeakSet();
/** @type {Set<string>} */ const forbidden = new Set(); // addresses that the page's Content-Security-Policy forbids
let told = false; // the console names the directive once, though a WebSocket is tried again and again
globalThis.document?.addEventListener?.('securitypolicyviolation', ({ effectiveDirective, blockedURI }) => {
  if (effectiveDirective === 'connect-src') forbidden.add(new URL(blockedURI, location.href).host);
});

/**
 * Whether WebSockets to the server were blocked lately, also for a page before this one or for another tab; with a
 * time, keeps that they are.
 */
function blocked(/** @type {URL} */ { origin }, now = 0) {
  const key = `headcount_blocked ${origin}`;
  try {
    if (now) localStorage[key] = now;
    return Math.abs(Date.now() - localStorage[key]) < LATELY_MS; // the clock may have been set back
  } catch {
    return false; // there is no storage, or none for this page
  }
}

const me = `${Math.random()}`; // this tab's name among those that may have a stream

/**
 * How many event streams this tab may have. Tabs share a connection by Web Locks. Without them (plain http on the
 * network) each tab has its own, and together they must leave connections for the site: tabs that can be seen
 * have one stream each, and no more than TABS of them, by leases in the storage. The others poll.
 */
function mayStream(/** @type {URL} */ { origin }) {
  if (globalThis.navigator?.locks) return STREAMS;
  if (globalThis.document?.hidden) return 0;
  const key = `headcount_streams ${origin}`;
  try {
    const now = Date.now();
    const all = Object.entries(JSON.parse(localStorage[key] ?? '{}'));
    // the clock may have been set back
    const leases = Object.fromEntries(all.filter(([, until]) => until > now && until <= now + LEASE_MS));
    if (!(me in leases) && Object.keys(leases).length >= TABS) return 0;
    // Two tabs that write at once lose one of the leases, and that tab finds out when it asks again.
    localStorage[key] = JSON.stringify({ ...leases, [me]: now + LEASE_MS });
    return 1;
  } catch {
    return 0; // there is no storage, or none for this page
  }
}

/**
 * Finds out why there is no WebSocket, and what can be done. Returns a class to use
 * instead of WebSocket; a string, which is why the server does not let this page in;
 * null if no server is there, which it says in the console; undefined if a WebSocket is
 * to be tried again: a server that was just restarted answers over HTTP, too, and only a WebSocket
 * that fails while HTTP works is blocked.
 * @param {URL} address of the WebSocket
 * @param {number} failures how many attempts in a row have failed
 * @param {string} refusal what it returned before, if that was a string
 * @param {object} owner stands for the connection, the same at each of its attempts
 * @returns {Promise<any>}
 */
export default async function rescue(address, failures, refusal, owner) {
  const base = httpBase(address);
  const stored = address.searchParams.get('storage') !== 'none';
  // A page that is reloaded, or takes over from another tab, has the leave grace to be back.
  const found =
    failures === 1 && !refusal && stored && blocked(base) ? Fallback : await find(address, failures, refusal, owner);
  if (typeof found === 'string' && found !== refusal) console.error(`Headcount: ${found}`);
  if (found === Fallback && stored) blocked(base, Date.now());
  return found;
}

/** @type {typeof rescue} */
async function find(address, failures, refusal, owner) {
  const base = httpBase(address);
  const before = failures > 1 && answered.has(owner);
  answered.delete(owner);
  const stored = address.searchParams.get('storage') !== 'none';
  const token = address.searchParams.get('token');
  const away = (/** @type {string} */ words) => {
    // One failure may be a short one, and a browser without network says so itself.
    if (failures === 2 && navigator.onLine !== false) console.warn(`Headcount: ${base} ${words}`);
    return null;
  };
  const ask = (/** @type {string} */ path, /** @type {RequestInit} */ options = {}) =>
    fetch(at(path, base), {
      credentials: stored ? 'include' : 'omit',
      cache: 'no-store',
      signal: AbortSignal.timeout?.(ANSWER_MS),
      ...options,
    }).catch(() => undefined);
  const own = globalThis.origin ?? location.origin;
  let answer = await ask('-/counters?page=*');
  // Every site may load the script. Only allowed sites may use the rest.
  if (!answer && base.origin !== own && (await ask('-/headcount.js', { credentials: 'omit' }))) {
    answer = await ask('-/counters?page=*'); // a server that was restarted may have come back between the two
    if (!answer)
      return own === 'null'
        ? `${base.origin} does not allow this frame, whose origin is null. A file, or a frame with the attribute sandbox, has no origin that a server ` +
            'could allow. Add allow-same-origin to the sandbox attribute, or count on the page around the frame and send it the number by postMessage, ' +
            'or serve the file over HTTP.'
        : `${base.origin} does not allow pages of ${own}. Start the server with --allow-origins ${own}`;
  }
  if (!answer)
    return away(
      'does not answer; attempts go on by themselves. Is the server up? Does the Content-Security-Policy of this page, if it has one, ' +
        `name ${base.origin} and ${base.origin.replace('http', 'ws')} in connect-src?`,
    );
  const said = await json(answer);
  if (answer.status >= 500)
    return away(`answers with status ${answer.status}; attempts go on by themselves. ${said.detail ?? ''}`);
  if (!said.counters && answer.status !== 429)
    return `what answers at ${base} with status ${answer.status} is not a Headcount server. Name the server in the attribute or option "server"; a proxy must pass on all paths that begin with ${base.pathname}-/, without a log-in`;
  if (failures === 1 || refusal) {
    // Reading is for everybody. Who may write is told that this says no action, and nothing changes. It is about no
    // page, which might be private.
    const probe = await ask('-/me/unread', {
      method: 'PUT',
      body: '{}',
      headers: token ? { Authorization: `Bearer ${token}` } : {},
    });
    if (probe?.status === 401 || probe?.status === 403)
      return `${base} refuses this page: ${(await json(probe)).detail ?? `a proxy before it answers a PUT with status ${probe.status}`}`;
  }
  // A server that drains, is full, or cannot verify the token now, answers GETs, and takes neither WebSockets nor event
  // streams. A proxy that keeps events back may keep back that there is a stream.
  const abort = new AbortController();
  const late = new Promise((held) => setTimeout(held, ANSWER_MS, { status: 0 }));
  const stream = await Promise.race([
    ask(`*/counter/events${token ? `?${query('token', [token])}` : ''}`, { credentials: 'omit', signal: abort.signal }),
    late,
  ]);
  abort.abort();
  if (!stream || stream.status >= 500) return null;
  if (!before) {
    answered.add(owner);
    return;
  }
  if (!told && (told = forbidden.has(base.host)))
    console.warn(
      `Headcount: the Content-Security-Policy of this page forbids WebSockets; add ${base.origin.replace('http', 'ws')} to its connect-src. Until then it uses event streams and PUTs.`,
    );
  return Fallback;
}

const query = (/** @type {string} */ name, /** @type {string[]} */ values) =>
  values.map((value) => `${name}=${encodeURIComponent(value)}`).join('&');

/** The names in lists each of which fits into a query. @type {(names: string[]) => string[][]} */
const lists = (names, half = names.length >> 1) =>
  half && query('page', names).length > LONGEST
    ? [names.slice(0, half), names.slice(half)].flatMap((part) => lists(part))
    : names.length ? [names] : [];

/** What an answer says; that of a proxy may be no JSON. */
const json = (/** @type {Response} */ answer) => answer.json().catch(() => ({}));

function httpBase(/** @type {URL} */ address) {
  const base = new URL('..', address);
  const site = address.searchParams.get('site');
  if (site) base.searchParams.set('site', site);
  base.protocol = base.protocol.replace('ws', 'http');
  return base;
}

/** An address of the server, with the site that a page of the server's own names. */
function at(/** @type {string} */ path, /** @type {URL} */ base) {
  const url = new URL(path, base);
  for (const [name, value] of base.searchParams) url.searchParams.set(name, value);
  return url;
}

/**
 * Behaves like the WebSocket. It uses event streams for counts, counters and presence: a
 * stream that joins its page keeps the user there, and at its end the server waits the leave
 * grace, as after the end of a WebSocket. A hold by PUT begins each join: its answer says
 * who the user is and whether there is such a page. The hold is ended when a stream has
 * joined, and taken again when that stream breaks. It stays for pages that have no stream, and
 * where a proxy keeps events back.
 */
class Fallback extends EventTarget {
  #base;
  #token;
  #id;
  #stored; // whether there may be a cookie
  // joined pages -> the timer of their holds, 0 when a stream has joined
  /** @type {Map<string, any>} */ #held = new Map();
  /** @type {Set<string>} */ #subscribed = new Set(); // topics
  // pages that the server may refuse: it has not answered yet, and an event stream does not say why
  /** @type {Set<string>} */ #unsure = new Set();
  /** @type {Set<string>} */ #unheld = new Set(); // joined pages on which the server has not counted the user yet
  /** @type {Map<string, any>} */ #sets = new Map(); // keys of subscribed counters that have members -> the newest said
  /** @type {Map<string, Stream>} */ #streams = new Map(); // at most STREAMS
  /** @type {any[]} */ #timers;
  // requests that carry the user's id go one after the other, because the first answer may bring that id
  #turn = Promise.resolve();
  #closed = false;
  #over = new AbortController();
  /** @type {BroadcastChannel | undefined} */ #tabs; // those that have connections of their own
  #renewed = 0;

  constructor(/** @type {string} */ href) {
    super();
    const address = new URL(href);
    this.#base = httpBase(address);
    this.#token = address.searchParams.get('token');
    this.#id = address.searchParams.get('id');
    this.#stored = address.searchParams.get('storage') !== 'none';
    this.#turn = this.#begin(address.searchParams.get('back'));
    const { signal } = this.#over;
    globalThis.document?.addEventListener?.('visibilitychange', () => this.#listen(), { signal });
    if (!globalThis.navigator?.locks && globalThis.BroadcastChannel) {
      // The timers of a hidden tab may fire once a minute, and messages of other tabs come in time.
      this.#tabs = new BroadcastChannel(`headcount_renew ${this.#base.origin}`);
      this.#tabs.onmessage = () => this.#renew();
      signal.addEventListener('abort', () => this.#tabs?.close());
    }
    this.#timers = [
      setInterval(() => this.#unread(), UNREAD_MS),
      setInterval(() => this.#poll(), POLL_MS),
      setTimeout(() => this.#say({ type: 'reconnect', after_ms: 0 }), RETURN_MS),
    ];
  }

  send(/** @type {string} */ text) {
    const { type, page, pages = [], counters = [] } = JSON.parse(text);
    switch (type) {
      case 'join':
        if (this.#held.has(page)) return;
        this.#unsure.add(page);
        this.#unheld.add(page);
        this.#keep(page);
        break;
      case 'leave':
        clearInterval(this.#held.get(page));
        this.#held.delete(page);
        this.#unheld.delete(page);
        this.#hold(page, 'decrement');
        break;
      case 'subscribe':
        for (const p of pages) {
          this.#subscribed.add(p);
          this.#unsure.add(p);
        }
        for (const list of lists(pages)) this.#try(list);
        for (const key of counters) this.#admit(key);
        break;
      case 'unsubscribe':
        for (const p of pages) this.#subscribed.delete(p);
        for (const key of counters) {
          this.#subscribed.delete(COUNTER + key);
          this.#sets.delete(key);
        }
        break;
      case 'read':
        this.#unread('PUT', '{"action":"reset"}');
        break;
      case 'heartbeat':
        this.#fetch('-/counters?page=*').then(
          () => this.#say({ type: 'heartbeat' }),
          () => {},
        );
    }
    // The server gives a stream without an identity a new one, which would differ from that of a PUT under way.
    this.#turn.then(() => this.#listen());
  }

  close() {
    this.#closed = true;
    this.#over.abort();
    for (const page of this.#streams.keys()) this.#end(page);
    for (const timer of [...this.#timers, ...this.#held.values()]) clearTimeout(timer);
  }

  /**
   * The server has not greeted us before it has answered as the one that it knows us as. It learns from back, as from
   * that of a WebSocket, whether it was restarted since then.
   */
  async #begin(/** @type {string | null} */ back) {
    try {
      const { count } = await this.#fetch(back ? `-/me/unread?back=${back}` : '-/me/unread');
      this.#say({ type: 'welcome' });
      if (!this.#closed) this.dispatchEvent(new Event('open'));
      this.#say({ type: 'unread', count });
    } catch {
      this.#fail();
    }
  }

  #say(/** @type {object} */ frame) {
    if (!this.#closed) this.dispatchEvent(new MessageEvent('message', { data: JSON.stringify(frame) }));
  }

  /** The server is not heard any more. The user of this object opens a new one. */
  #fail() {
    if (!this.#closed) this.dispatchEvent(new Event('close'));
  }

  /** @type {(path: string, method?: string, body?: string) => Promise<any>} */
  async #fetch(path, method = 'GET', body = undefined) {
    /** @type {Record<string, string>} */ const headers = {};
    if (body) headers['Content-Type'] = 'application/json';
    if (this.#token) headers.Authorization = `Bearer ${this.#token}`;
    else if (this.#id) headers['Headcount-Id'] = this.#id;
    if (this.#closed) throw new Error('closed');
    // Without a limit, requests of a network that swallows them keep all the browser's connections to the server for
    // minutes.
    const signal = AbortSignal.timeout?.(ANSWER_MS);
    const answer = await fetch(at(path, this.#base), {
      method,
      headers,
      body,
      signal,
      credentials: this.#stored ? 'include' : 'omit',
      cache: 'no-store',
    });
    const id = answer.headers.get('Headcount-Id');
    // Where a cookie says who the user is, only a PUT sets it.
    if (id && (this.#id || method !== 'GET')) this.#say({ type: 'welcome', id: (this.#id = id) });
    const said = await answer.json();
    if (answer.ok) return said;
    throw Object.assign(new Error(said.detail ?? said.title), { status: answer.status });
  }

  /** Keeps the user on a page by PUTs, until a stream does. */
  #keep(/** @type {string} */ page) {
    clearInterval(this.#held.get(page));
    this.#held.set(
      page,
      setInterval(() => this.#hold(page, 'increment'), RENEW_MS),
    );
    this.#hold(page, 'increment');
  }

  /** Renews what is held by PUTs, if that is due. */
  #renew() {
    const now = performance.now();
    if (now - this.#renewed < RENEW_MS) return;
    this.#renewed = now;
    for (const [page, timer] of this.#held) if (timer) this.#hold(page, 'increment');
  }

  #hold(/** @type {string} */ page, /** @type {string} */ action) {
    this.#turn = this.#turn
      .then(() => this.#fetch(`${encodeURIComponent(page)}/counter`, 'PUT', `{"action":"${action}"}`))
      .then((counter) => {
        this.#unsure.delete(page);
        if (action === 'increment') this.#unheld.delete(page);
        this.#count(counter);
      })
      .catch(({ status, message }) => {
        // A PUT without an answer, or that the server cannot carry out now, is sent again. The streams also notice the
        // loss.
        if (status) this.#unsure.delete(page);
        if (status === 401) this.#fail(); // the token has expired: the next connection asks for another one
        else if (status < 500 && !this.#refuse(page, status, message))
          this.#say({ type: 'error', code: 'refused', message: `${page}: ${message}` });
      });
  }

  /** Gives up a page if the server does not have it, or not for this user; returns whether it does. */
  #refuse(/** @type {string} */ page, /** @type {number} */ status, /** @type {string} */ message) {
    const code = { 400: 'bad_page', 403: 'forbidden' }[status];
    if (!code) return false;
    clearInterval(this.#held.get(page));
    this.#held.delete(page);
    this.#unheld.delete(page);
    this.#subscribed.delete(page);
    this.#say({ type: 'error', code, message, page });
    return true;
  }

  #unread(method = 'GET', body = '') {
    this.#turn = this.#turn
      .then(() => this.#fetch('-/me/unread', method, body || undefined))
      .then(({ count }) => this.#say({ type: 'unread', count }))
      .catch(() => {});
  }

  /**
   * Reads pages that are subscribed, and gives up those that the server refuses, so that they take nothing with them.
   */
  async #try(/** @type {string[]} */ pages) {
    try {
      const { counters } = await this.#fetch(`-/counters?${query('page', pages)}`);
      for (const counter of counters) this.#count(counter);
    } catch (/** @type {any} */ { status, message }) {
      if (!status) return this.#fail();
      // It does not say which one it is.
      if ((status === 400 || status === 403) && pages.length > 1) return pages.forEach((page) => this.#try([page]));
      if (pages.length === 1) this.#refuse(pages[0], status, message);
    }
    for (const page of pages) this.#unsure.delete(page);
    this.#turn.then(() => this.#listen());
  }

  /** Subscribes to a counter if the server lets us; an event stream does not say why it is refused. */
  #admit(/** @type {string} */ key) {
    this.#turn = this.#turn
      .then(() => this.#fetch(`${COUNTERS}/${encodeURIComponent(key)}`))
      .then((counter) => {
        this.#subscribed.add(COUNTER + key);
        this.#sets.delete(key); // it is said again
        this.#counter(counter);
        this.#listen();
      })
      .catch(({ status, message }) => {
        if (status === 400 || status === 403)
          this.#say({ type: 'error', code: status === 400 ? 'bad_counter' : 'forbidden', message, counter: key });
        else if (!status) this.#fail();
      });
  }

  /** Says a count. It is stale, like that of a late join over a WebSocket, until the user of a joined page is in it. */
  #count(/** @type {any} */ count) {
    this.#say({ type: 'count', ...count, ...(this.#unheld.has(count.page) && { stale: true }) });
  }

  /** Says a counter, with whether the user is a member, which the streams do not tell. */
  #counter(/** @type {any} */ counter) {
    const { key, kind, version } = counter;
    const say = (/** @type {any} */ { member, ...now }) =>
      this.#say({ type: 'counter', ...now, ...(member && { mine: true }) });
    if (kind !== 'members') return say(counter);
    const known = this.#sets.get(key);
    if (known?.version === version) return;
    this.#sets.set(key, counter);
    this.#turn = this.#turn
      .then(() => {
        if (this.#sets.get(key) === counter) return this.#fetch(`${COUNTERS}/${encodeURIComponent(key)}/members/me`);
      })
      .then((answer) => answer && say(answer))
      .catch(({ status }) => {
        if (status)
          say(counter); // who may only read is no member
        else this.#sets.delete(key);
      });
  }

  get #wanted() {
    return [...new Set([...this.#held.keys(), ...this.#subscribed])].filter((topic) => !this.#unsure.has(topic));
  }

  /** Opens and closes streams so that the first of the wanted pages have one each, which joins what is held. */
  #listen() {
    if (this.#closed) return;
    const wanted = this.#wanted;
    const pages = wanted.length ? wanted.slice(0, mayStream(this.#base)) : [];
    for (const [page, { joins }] of this.#streams) {
      if (pages.includes(page) && joins === this.#held.has(page)) continue;
      if (this.#held.get(page) === 0) this.#keep(page);
      this.#end(page);
    }
    for (const page of pages) if (!this.#streams.has(page)) this.#open(page);
  }

  #end(/** @type {string} */ page) {
    const stream = this.#streams.get(page);
    this.#streams.delete(page);
    stream?.source.close();
    stream?.before?.close();
    clearTimeout(stream?.renewal);
  }

  /** Opens a stream, and ends the one that the page has when the new one has joined. */
  #open(/** @type {string} */ page) {
    const key = page.startsWith(COUNTER) && page.slice(1);
    const url = at(
      key ? `${COUNTERS}/${encodeURIComponent(key)}/events` : `${encodeURIComponent(page)}/counter/events`,
      this.#base,
    );
    const joins = this.#held.has(page);
    if (this.#token) url.searchParams.set('token', this.#token);
    else if (this.#id) url.searchParams.set('id', this.#id);
    if (!this.#stored) url.searchParams.set('storage', 'none');
    if (joins) url.searchParams.set('join', '1');
    const source = new EventSource(url, { withCredentials: this.#stored });
    /** @type {Stream} */ const stream = {
      source,
      joins,
      before: this.#streams.get(page)?.source,
      renewal: 0,
      heard: false,
    };
    this.#streams.set(page, stream);
    const on = (/** @type {string} */ type, /** @type {(said: any) => void} */ say) =>
      source.addEventListener(type, ({ data }) => {
        stream.heard = true;
        say(JSON.parse(data));
      });
    on('count', (count) => this.#count(count));
    on('counter', (counter) => this.#counter(counter));
    source.addEventListener('join', ({ data }) => {
      if (this.#streams.get(page) !== stream) return;
      this.#unheld.delete(page);
      stream.before?.close();
      clearTimeout(stream.renewal);
      // that proves that somebody is here
      stream.renewal = setTimeout(() => this.#open(page), JSON.parse(data).heartbeat_ms);
      if (!this.#held.get(page)) return;
      clearInterval(this.#held.get(page));
      this.#held.set(page, 0);
      this.#hold(page, 'decrement');
    });
    source.addEventListener('error', () => {
      stream.heard = false;
      if (this.#held.get(page) === 0) this.#keep(page);
      if (source.readyState === EventSource.CLOSED) this.#fail();
      // it tries again, and does not say whether the server is there
      else this.#fetch('-/counters?page=*').catch(({ status }) => status || this.#fail());
    });
  }

  #poll() {
    this.#listen();
    this.#tabs?.postMessage('');
    this.#read(this.#wanted.filter((page) => !this.#streams.get(page)?.heard));
  }

  #read(/** @type {string[]} */ topics) {
    const ask = (
      /** @type {string} */ path,
      /** @type {string} */ name,
      /** @type {string[]} */ names,
      /** @type {(counter: any) => void} */ say,
    ) => {
      for (const list of lists(names))
        this.#fetch(`${path}?${query(name, list)}`)
          .then(({ counters }) => counters.forEach(say))
          .catch(({ status }) => status || this.#fail());
    };
    const isCounter = (/** @type {string} */ topic) => topic.startsWith(COUNTER);
    ask(
      '-/counters',
      'page',
      topics.filter((topic) => !isCounter(topic)),
      (counter) => this.#count(counter),
    );
    ask(
      COUNTERS,
      'key',
      topics.filter(isCounter).map((topic) => topic.slice(1)),
      (counter) => this.#counter(counter),
    );
  }
}

// @ts-check
// headcount.js loads this file when it could not open a WebSocket. The file finds
// out whether this site may use the server. It replaces the WebSocket where a proxy
// or another program between browser and server blocks WebSockets.

const RENEW_MS = 7_000; // a hold lasts three presence timeouts, 21 s unless the server has other settings
const UNREAD_MS = 15_000;
const POLL_MS = 3_000;
const STREAMS = 4; // a browser has six connections to a server of HTTP/1.1; further pages are polled
const RETURN_MS = 300_000; // after this time the client tries a WebSocket again
const COUNTERS = 'api/v1/counters';
const COUNTER = '\t'; // a counter's topic is its key after this; a page is its own topic

let told = false;

/**
 * Returns a class to use instead of WebSocket, or undefined.
 * @param {URL} address of the WebSocket
 * @param {number} failures how many attempts in a row have failed
 * @returns {Promise<any>}
 */
export default async function rescue(address, failures) {
  const base = httpBase(address);
  if (failures > 1 && failures % 2) return; // nothing has changed since the last check
  if (await reach(new URL('-/counters?page=*', base))) return failures % 2 ? undefined : Fallback;
  if (base.origin === location.origin || told || !(await reach(new URL('-/headcount.js', base), 'omit'))) return;
  // Every site may load the script. Only allowed sites may use the rest.
  told = true;
  console.error(
    `Headcount: ${base.origin} does not allow pages of ${location.origin}. ` +
      (location.origin === 'null'
        ? 'A file or a sandboxed frame has no origin to allow. Serve the page over HTTP.'
        : `Start the server with --allow-origins ${location.origin}`),
  );
}

/** Whether an answer came, with any status, that this page may read. */
const reach = (/** @type {URL} */ url, /** @type {RequestCredentials} */ credentials = 'include') =>
  fetch(url, { credentials, cache: 'no-store' }).then(() => true, () => false);

function httpBase(/** @type {URL} */ address) {
  const base = new URL('..', address);
  base.protocol = base.protocol.replace('ws', 'http');
  return base;
}

/**
 * Behaves like the WebSocket. It uses event streams for counts and counters, and PUTs for presence.
 * A user whose page goes without a leave stays counted until the hold ends, so here,
 * too, others do not notice a reload.
 */
class Fallback extends EventTarget {
  #base;
  #token;
  #id;
  /** @type {Map<string, any>} */ #held = new Map(); // joined pages -> their timers
  /** @type {Set<string>} */ #subscribed = new Set(); // topics
  /** @type {Map<string, any>} */ #sets = new Map(); // keys of subscribed counters that have members -> the newest said
  /** @type {Map<string, EventSource>} */ #streams = new Map(); // at most STREAMS
  /** @type {any[]} */ #timers;
  #turn = Promise.resolve(); // requests that carry the user's id go one after the other, because the first answer may bring that id
  #closed = false;

  constructor(/** @type {string} */ href) {
    super();
    const address = new URL(href);
    this.#base = httpBase(address);
    this.#token = address.searchParams.get('token');
    this.#id = address.searchParams.get('id');
    this.#timers = [
      setTimeout(() => {
        this.dispatchEvent(new Event('open'));
        this.#say({ type: 'welcome' });
        this.#unread();
      }),
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
        this.#held.set(page, setInterval(() => this.#hold(page, 'increment'), RENEW_MS));
        this.#hold(page, 'increment');
        break;
      case 'leave':
        clearInterval(this.#held.get(page));
        this.#held.delete(page);
        this.#hold(page, 'decrement');
        break;
      case 'subscribe':
        for (const p of pages) this.#subscribed.add(p);
        this.#read(pages);
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
        this.#fetch('-/counters?page=*').then(() => this.#say({ type: 'heartbeat' }), () => {});
    }
    // The server gives a stream without an identity a new one, which would differ from that of a PUT under way.
    this.#turn.then(() => this.#closed || this.#listen());
  }

  close() {
    this.#closed = true;
    for (const stream of this.#streams.values()) stream.close();
    for (const timer of [...this.#timers, ...this.#held.values()]) clearTimeout(timer);
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
    const answer = await fetch(new URL(path, this.#base), { method, headers, body, credentials: 'include', cache: 'no-store' });
    const id = answer.headers.get('Headcount-Id');
    if (id) this.#say({ type: 'welcome', id: (this.#id = id) });
    const said = await answer.json();
    if (answer.ok) return said;
    throw Object.assign(new Error(said.detail ?? said.title), { status: answer.status });
  }

  #hold(/** @type {string} */ page, /** @type {string} */ action) {
    this.#turn = this.#turn
      .then(() => this.#fetch(`${encodeURIComponent(page)}/counter`, 'PUT', `{"action":"${action}"}`))
      .then((counter) => this.#say({ type: 'count', ...counter }))
      .catch(({ status, message }) => {
        // A PUT without an answer is sent again. The streams also notice the loss.
        if (status === 400) {
          clearInterval(this.#held.get(page));
          this.#held.delete(page);
        }
        if (status) this.#say({ type: 'error', code: status === 400 ? 'bad_page' : 'refused', message, page });
      });
  }

  #unread(method = 'GET', body = '') {
    this.#turn = this.#turn
      .then(() => this.#fetch('-/me/unread', method, body || undefined))
      .then(({ count }) => this.#say({ type: 'unread', count }))
      .catch(() => {});
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
        if (status === 400 || status === 403) this.#say({ type: 'error', code: status === 400 ? 'bad_counter' : 'forbidden', message, counter: key });
        else if (!status) this.#fail();
      });
  }

  /** Says a counter, with whether the user is a member, which the streams do not tell. */
  #counter(/** @type {any} */ counter) {
    const { key, kind, version } = counter;
    const say = (/** @type {any} */ { member, ...now }) => this.#say({ type: 'counter', ...now, ...(member && { mine: true }) });
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
        if (status) say(counter); // who may only read is no member
        else this.#sets.delete(key);
      });
  }

  get #wanted() {
    return [...new Set([...this.#held.keys(), ...this.#subscribed])];
  }

  /** Opens and closes streams so that the first of the wanted pages have one each. */
  #listen() {
    const pages = this.#wanted;
    for (const [page, stream] of this.#streams) {
      if (pages.includes(page)) continue;
      stream.close();
      this.#streams.delete(page);
    }
    for (const page of pages) {
      if (this.#streams.has(page) || this.#streams.size >= STREAMS) continue;
      const key = page.startsWith(COUNTER) && page.slice(1);
      const url = new URL(key ? `${COUNTERS}/${encodeURIComponent(key)}/events` : `${encodeURIComponent(page)}/counter/events`, this.#base);
      if (this.#token) url.searchParams.set('token', this.#token);
      const stream = new EventSource(url, { withCredentials: true });
      stream.addEventListener('count', ({ data }) => this.#say({ type: 'count', ...JSON.parse(data) }));
      stream.addEventListener('counter', ({ data }) => this.#counter(JSON.parse(data)));
      stream.addEventListener('error', () => stream.readyState === EventSource.CLOSED && this.#fail());
      this.#streams.set(page, stream);
    }
  }

  #poll() {
    this.#read(this.#wanted.filter((page) => !this.#streams.has(page)));
  }

  #read(/** @type {string[]} */ topics) {
    const ask = (/** @type {string} */ path, /** @type {string} */ name, /** @type {string[]} */ names, /** @type {(counter: any) => void} */ say) => {
      if (!names.length) return;
      this.#fetch(`${path}?${names.map((each) => `${name}=${encodeURIComponent(each)}`).join('&')}`)
        .then(({ counters }) => counters.forEach(say))
        .catch(({ status }) => status || this.#fail());
    };
    const isCounter = (/** @type {string} */ topic) => topic.startsWith(COUNTER);
    ask('-/counters', 'page', topics.filter((topic) => !isCounter(topic)), (counter) => this.#say({ type: 'count', ...counter }));
    ask(COUNTERS, 'key', topics.filter(isCounter).map((topic) => topic.slice(1)), (counter) => this.#counter(counter));
  }
}

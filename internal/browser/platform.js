// The parts of a browser that the client uses. They are made of `host`, by which the simulation provides time, storage,
// other tabs and the network. Nothing here knows Headcount.
'use strict';

// ---- events

class Event {
  constructor(type) {
    this.type = type;
  }
}
class MessageEvent extends Event {
  constructor(type, { data }) {
    super(type);
    this.data = data;
  }
}
class CustomEvent extends Event {
  constructor(type, { detail } = {}) {
    super(type);
    this.detail = detail;
  }
}

function reportError(error) {
  host.failed(`${error} ${error?.stack}`);
}

class EventTarget {
  #listeners = [];

  addEventListener(type, listener, { signal } = {}) {
    if (signal?.aborted) return;
    const one = { type, listener };
    this.#listeners.push(one);
    signal?.addEventListener('abort', () => (this.#listeners = this.#listeners.filter((other) => other !== one)));
  }
  dispatchEvent(event) {
    for (const one of [...this.#listeners]) {
      if (one.type !== event.type || !this.#listeners.includes(one)) continue;
      try {
        one.listener.call(this, event);
      } catch (error) {
        reportError(error);
      }
    }
    return true;
  }
}

class DOMException extends Error {
  constructor(message, name) {
    super(message);
    this.name = name;
  }
}

class AbortSignal extends EventTarget {
  aborted = false;

  static timeout(ms) {
    const controller = new AbortController();
    setTimeout(() => controller.abort(), ms);
    return controller.signal;
  }
}
class AbortController {
  signal = new AbortSignal();

  abort() {
    if (this.signal.aborted) return;
    this.signal.aborted = true;
    this.signal.dispatchEvent(new Event('abort'));
  }
}

const aborted = () => new DOMException('aborted', 'AbortError');

// ---- the document

const windowEvents = new EventTarget();
const addEventListener = windowEvents.addEventListener.bind(windowEvents);
const document = Object.assign(new EventTarget(), { hidden: false, cookie: '' });
// The library's own href leaves out changes of searchParams.
globalThis.URL = class extends URL {
  get href() {
    return this.toString();
  }
};
const location = new URL(host.address);
const crypto = { getRandomValues: (bytes) => bytes.map(() => host.random() * 256) };
const performance = { now: host.now };
const queueMicrotask = (task) => void Promise.resolve().then(task).catch(reportError);
const console = { error: host.say, warn: host.say, log: host.say };
const localStorage = new Proxy(
  {},
  {
    get: (_, key) => host.stored(key) ?? undefined,
    set: (_, key, value) => host.store(key, `${value}`) ?? true,
  },
);

// The interpreter's own has no option `numeric`, which compares digits in a string as numbers.
String.prototype.localeCompare = function (other) {
  const [ours, theirs] = [this.split(/(\d+)/), other.split(/(\d+)/)];
  for (let i = 0; i < ours.length && i < theirs.length; i++) {
    const [a, b] = i % 2 ? [BigInt(ours[i]), BigInt(theirs[i])] : [ours[i], theirs[i]];
    if (a !== b) return a < b ? -1 : 1;
  }
  return ours.length - theirs.length;
};

// ---- other tabs

class BroadcastChannel {
  #channel;

  constructor(name) {
    this.#channel = host.channel(name, (text) => this.onmessage?.({ data: JSON.parse(text) }));
  }
  postMessage(message) {
    this.#channel.post(JSON.stringify(message));
  }
  close() {
    this.#channel.close();
  }
}

const navigator = {
  onLine: true,
  locks: {
    request: (name, { signal, steal = false }, callback) =>
      new Promise((resolve, reject) => {
        if (signal?.aborted) return reject(aborted());
        const granted = async () => {
          try {
            resolve(await callback({ name }));
          } catch (error) {
            reject(error);
          }
          lock.release();
        };
        const lock = host.lock(name, steal, granted, () => reject(aborted()));
        signal?.addEventListener('abort', () => lock.withdraw() && reject(aborted()));
      }),
  },
};

// ---- the network

class WebSocket extends EventTarget {
  #socket;

  constructor(url, protocol) {
    super();
    this.#socket = host.socket(`${url}`, protocol, {
      opened: () => this.dispatchEvent(new Event('open')),
      received: (data) => this.dispatchEvent(new MessageEvent('message', { data })),
      ended: () => this.dispatchEvent(new Event('close')),
    });
  }
  send(text) {
    this.#socket.send(text);
  }
  close() {
    this.#socket.close();
  }
}

const fetch = (url, { method = 'GET', headers = {}, body = '', signal } = {}) =>
  new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(aborted());
    const answered = (status, fields, text) =>
      resolve({
        status,
        ok: status >= 200 && status < 300,
        headers: { get: (name) => fields[name] ?? null },
        json: async () => JSON.parse(text),
      });
    const call = host.call({ method, url: `${url}`, headers, body }, {
      answered,
      failed: () => reject(new TypeError('Failed to fetch')),
    });
    signal?.addEventListener('abort', () => {
      call.cancel();
      reject(aborted());
    });
  });

const AGAIN_MS = 3_000; // until a broken stream is opened again

class EventSource extends EventTarget {
  static CLOSED = 2;
  readyState = 0;
  #url;
  #call;
  #timer;
  #text = '';

  constructor(url) {
    super();
    this.#url = `${url}`;
    this.#open();
  }
  #open() {
    this.#text = '';
    this.#call = host.call({ method: 'GET', url: this.#url, headers: { Accept: 'text/event-stream' }, body: '' }, {
      answered: (status) => {
        this.readyState = 1;
        if (status !== 200) this.#fail(true);
      },
      received: (text) => this.#receive(text),
      failed: () => this.#fail(false),
    });
  }
  #fail(forGood) {
    if (this.readyState === EventSource.CLOSED) return;
    this.readyState = forGood ? EventSource.CLOSED : 0;
    if (!forGood) this.#timer = setTimeout(() => this.#open(), AGAIN_MS);
    this.dispatchEvent(new Event('error'));
  }
  #receive(text) {
    const events = (this.#text + text).split('\n\n');
    this.#text = events.pop();
    for (const event of events) {
      const fields = Object.fromEntries(
        event
          .split('\n')
          .map((line) => line.match(/^(\w+): ?(.*)$/))
          .filter(Boolean)
          .map(([, name, value]) => [name, value]),
      );
      if (fields.data !== undefined)
        this.dispatchEvent(new MessageEvent(fields.event ?? 'message', { data: fields.data }));
    }
  }
  close() {
    this.readyState = EventSource.CLOSED;
    clearTimeout(this.#timer);
    this.#call.cancel();
  }
}

Object.assign(globalThis, {
  Event, MessageEvent, CustomEvent, EventTarget, DOMException, AbortSignal, AbortController, BroadcastChannel,
  WebSocket, EventSource, addEventListener, console, crypto, document, fetch, localStorage, location, navigator,
  performance, queueMicrotask, reportError, windowEvents,
});

// What the tests of the client make for it: WebSockets, and a clock.
import { mock } from 'node:test';

/** Every WebSocket that was made, in order. */
export const sockets = [];

/** An anonymous id, as a server issues it. */
export const signed = (name) => `${name.padEnd(22, '-')}.${'s'.repeat(22)}`;

export class FakeWebSocket extends EventTarget {
  sent = [];
  closed = false;

  constructor(url, protocol) {
    super();
    this.url = new URL(url);
    this.protocol = protocol;
    sockets.push(this);
  }
  send(text) {
    this.sent.push(JSON.parse(text));
  }
  close() {
    this.closed = true;
  }

  // These do what a server does.
  open() {
    this.dispatchEvent(new Event('open'));
  }
  say(frame) {
    this.dispatchEvent(new MessageEvent('message', { data: JSON.stringify(frame) }));
  }
  welcome(more) {
    this.open();
    this.say({ type: 'welcome', user: 'u', id: signed('u'), heartbeat_ms: 15_000, ...more });
  }
  drop() {
    this.dispatchEvent(new Event('close'));
  }

  /** The frames sent since the last call. */
  take() {
    return this.sent.splice(0);
  }
}

/** Lets everything run that waits for no timer. */
export async function settle() {
  for (let i = 0; i < 5; i++) await new Promise(setImmediate);
}

export async function tick(ms) {
  mock.timers.tick(ms);
  await settle();
}

/** Takes whatever is done with an element. Its tables and lists are empty, and what is set stays. */
export function element() {
  const kept = { textContent: '', hidden: true, value: '', dataset: {}, rows: [], cells: [], options: [] };
  return new Proxy(() => element(), {
    get: (_, name) => (typeof name === 'symbol' ? undefined : (kept[name] ??= element())),
    set: (_, name, value) => {
      kept[name] = value;
      return true;
    },
  });
}

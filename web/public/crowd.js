// Simulated viewers. Each gets an identity of its own by a PUT without one, and
// then has a WebSocket like any visitor: it can leave, or just be gone.
import { at } from './at.js';

const BOUND = 150; // browsers allow some 200 WebSockets
const CREDIT = 90; // the server lets 100 nameless callers of one address in at once, and ten a second after
const RATE = 9; // a little under that saves most refusals
const AT_ONCE = 6; // requests to one server

const sleep = (ms) => new Promise((wake) => setTimeout(wake, ms));

export class Crowd {
  bound = BOUND;
  waiting = 0; // viewers still to come
  trouble = '';
  #here = new Set(); // WebSockets
  #credit = CREDIT;
  #running = false;
  #page; // returns the page that who comes goes to
  #changed;

  constructor(page, changed) {
    this.#page = page;
    this.#changed = changed;
    setInterval(() => (this.#credit = Math.min(CREDIT, this.#credit + RATE / 2)), 500);
  }

  get size() {
    return this.#here.size;
  }

  /** How many more may come. */
  get room() {
    return BOUND - this.waiting - this.size;
  }

  async bring(number) {
    this.waiting += Math.min(number, this.room);
    this.trouble = '';
    if (this.#running) return;
    this.#running = true;
    while (this.waiting > 0) {
      this.#changed();
      while (this.#credit < 1) await sleep(100);
      const batch = Math.min(this.waiting, Math.floor(this.#credit), AT_ONCE);
      this.#credit -= batch;
      await Promise.all(Array.from({ length: batch }, () => this.#one(this.#page())));
    }
    this.#running = false;
    this.#changed();
  }

  /** Lets all of them go: with a leave, or as if their machines were switched off. */
  disperse(politely) {
    this.waiting = 0;
    for (const socket of this.#here) {
      if (politely) socket.send(JSON.stringify({ type: 'leave', page: socket.page }));
      socket.close();
    }
  }

  async #one(page) {
    try {
      const answer = await this.#hold(page, 'increment');
      if (answer.status === 429 || answer.status === 503) {
        await sleep(Math.min(Number(answer.headers.get('Retry-After')) || 1, 30) * 1_000);
        return;
      }
      const id = answer.headers.get('Headcount-Id');
      if (!answer.ok || !id)
        throw new Error((await answer.json().catch(() => ({}))).detail ?? `the server answers ${answer.status}`);
      if (this.waiting === 0) return await this.#hold(page, 'decrement', id); // not wanted any more
      this.waiting--;
      await this.#connect(page, id);
      await this.#hold(page, 'decrement', id); // the connection counts from now on
    } catch (error) {
      this.waiting = 0;
      this.trouble = error instanceof TypeError ? 'the server does not answer' : error.message;
    }
    this.#changed();
  }

  /** A PUT without our own cookie. */
  #hold(page, action, id) {
    return fetch(at(`${encodeURIComponent(page)}/counter`), {
      method: 'PUT',
      credentials: 'omit',
      headers: { 'Content-Type': 'application/json', ...(id && { 'Headcount-Id': id }) },
      body: JSON.stringify({ action }),
    });
  }

  /** Resolves when the server counts the viewer. */
  #connect(page, id) {
    return new Promise((counted, failed) => {
      const address = new URL(at(`-/ws?id=${encodeURIComponent(id)}`));
      address.protocol = address.protocol.replace('http', 'ws');
      const socket = new WebSocket(address, 'headcount.v1');
      socket.page = page;
      socket.onopen = () => {
        this.#here.add(socket);
        socket.send(JSON.stringify({ type: 'join', page }));
      };
      socket.onmessage = ({ data }) => JSON.parse(data).type === 'count' && counted();
      socket.onclose = () => {
        this.#here.delete(socket);
        failed(new Error('a viewer could not connect'));
        this.#changed();
      };
    });
  }
}

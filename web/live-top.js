// @ts-check
// <live-top>: the pages with the most users, live. It is a module of its own, which only
// pages with such a list load:
//
//   <script type="module" src="https://headcount.example.com/-/live-top.js"></script>
//   <live-top n="5"></live-top>
//
//     n="5"         how many pages, 1 to 100; default 10
//     label="…"     what the list is called; default "Most viewed pages"
//     refused="…"   what stands there when the server does not let visitors see the list
//     server="https://…", storage="none"  as for the other elements
//
// The element shows its content until the list is there. Style it with ::part(list),
// ::part(item), ::part(page), ::part(count), ::part(refused), and ::part(offline) for the
// list while there is no connection. An event `top` follows each change, an event
// `refused` a refusal, with the error.
//
// Browsers open few HTTP/1.1 connections to one host, for all their tabs together. So a
// tab that cannot be seen has no stream.

import { Headcount, Shell, define } from './headcount.js';
import { dress } from './live.js';

const BACKOFF_MS = 1_000; // the first retry comes within this time, each further one within twice as long, ...
const BACKOFF_MAX_MS = 30_000; // ... but at most this
const SILENCE_MS = 60_000; // a stream that has brought not even a comment for this long is dead

/** @typedef {import('./live-top.js').PageUsers} PageUsers */
/** @typedef {import('./live-top.js').TopOptions} TopOptions */

/**
 * Where the server is, and what says there who the user is.
 * @type {(method: string, name: string, base: URL, token?: string) => Promise<{base: URL, token?: string}>}
 */
const where = async (_method, _name, base, token) => ({ base, token });

/**
 * Calls back with the pages with the most users, now and at every change, at most once a
 * second, and again after a reconnect.
 * @param {(top: PageUsers[], stale: boolean) => void} callback
 * @param {TopOptions} [options]
 * @returns {() => void} ends it
 */
export function watchTop(callback, { n = 10, headers = {}, failed = () => {}, server, storage } = {}) {
  const headcount = Headcount.at({ ...(server && { server }), ...(storage && { storage }) });
  /** @type {AbortController | undefined} */ let stream; // of a tab that can be seen
  let refused = false; // to this user
  let failures = 0;
  let refusals = 0; // of a token, in a row

  /** An attempt, which ends after a silence, also before the answer: a network may lose a request without a word. */
  const attempt = async (/** @type {AbortSignal} */ ended) => {
    const over = new AbortController();
    const end = () => over.abort(new Error('The server has been silent for a minute.'));
    ended.addEventListener('abort', end);
    /** @type {any} */ let silence; // timer
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(end, SILENCE_MS);
    };
    heard();
    try {
      await read(over.signal, heard);
    } finally {
      clearTimeout(silence);
      ended.removeEventListener('abort', end);
    }
  };
  const read = async (/** @type {AbortSignal} */ signal, /** @type {() => void} */ heard) => {
    const { base, token } = await headcount.lend(where, '', '');
    const url = new URL(`-/top/events${base.search}`, base);
    url.searchParams.set('n', `${n}`);
    const answer = await fetch(url, {
      headers: { ...(token && { Authorization: `Bearer ${token}` }), ...headers },
      credentials: 'omit',
      cache: 'no-store',
      signal,
    });
    if (!answer.ok) {
      const { detail = `The server answered with status ${answer.status}.` } = await answer.json().catch(() => ({}));
      throw Object.assign(new Error(detail), { status: answer.status, token: !!token });
    }
    const reader = /** @type {ReadableStream} */ (answer.body).pipeThrough(new TextDecoderStream()).getReader();
    let text = '';
    for (;;) {
      const { value, done } = await reader.read();
      heard();
      if (done) throw new Error('The event stream has ended.');
      const events = (text + value).split('\n\n');
      text = events.pop() ?? '';
      for (const event of events) {
        const data = /^data: (.*)$/m.exec(event)?.[1];
        if (!data) continue; // a comment
        failures = refusals = 0;
        const { top, stale } = JSON.parse(data);
        queueMicrotask(() => signal.aborted || callback(top, !!stale)); // what it throws does not end the stream
      }
    }
  };
  const follow = async (/** @type {AbortSignal} */ signal) => {
    while (!signal.aborted) {
      try {
        await attempt(signal);
      } catch (/** @type {any} */ error) {
        if (signal.aborted) return;
        // The answer would be the same again, unless it is of a token that has run out.
        const expired = error.token && error.status === 401;
        refusals = expired ? refusals + 1 : 0;
        refused = error.status < 500 && error.status !== 429 && !(expired && refusals <= 5);
        const final = refused;
        queueMicrotask(() => failed(error, final)); // what it throws does not end the stream
        if (final) return;
      }
      const longest = Math.min(BACKOFF_MAX_MS, BACKOFF_MS * 2 ** failures++);
      await new Promise((again) => setTimeout(again, Math.random() * longest));
    }
  };
  const look = () => {
    stream?.abort();
    stream = document.hidden || refused ? undefined : new AbortController();
    if (stream) follow(stream.signal);
  };
  // The next user may see what this one may not, and the other way round.
  const another = () => {
    refused = false;
    refusals = 0;
    look();
  };
  document.addEventListener('visibilitychange', look);
  headcount.addEventListener('user', another);
  look();
  return () => {
    document.removeEventListener('visibilitychange', look);
    headcount.removeEventListener('user', another);
    stream?.abort();
  };
}

const STYLE = `
  [part~=list] { margin: 0; padding-inline-start: 2em; }
  [part~=count] { margin-inline-start: .5em; font-variant-numeric: tabular-nums; }
  [part~=offline], [part~=stale] { opacity: var(--headcount-offline-opacity, .45); transition: opacity .2s .5s; }
  [part~=stale] { font-style: italic; }
`;

/** Makes a node with a part of its own. */
function part(/** @type {string} */ tag, /** @type {string} */ name, text = '') {
  const node = document.createElement(tag);
  node.setAttribute('part', name);
  node.textContent = text;
  return node;
}

/** Makes the line of a page. */
function line(/** @type {string} */ page) {
  const item = part('li', 'item');
  item.append(part('span', 'page', page), ' ', part('span', 'count'));
  return item;
}

export class LiveTop extends Shell {
  static observedAttributes = ['n', 'label', 'refused', 'server', 'storage'];

  /** @type {Shell['begin']} */
  begin(signal) {
    const get = (/** @type {string} */ name) => this.getAttribute(name) || undefined;
    const root = this.shadowRoot ?? this.attachShadow({ mode: 'open' });
    const fill = (/** @type {HTMLElement} */ node) => {
      root.replaceChildren(node);
      dress(root, STYLE);
    };
    fill(document.createElement('slot'));
    const list = part('ol', 'list');
    list.setAttribute('aria-label', get('label') ?? 'Most viewed pages');
    /** @type {Map<string, HTMLElement>} */ let items = new Map();
    let known = '';

    /** Changes only what differs, so that the rest of the list stays still. */
    const show = (/** @type {PageUsers[]} */ top, /** @type {boolean} */ stale) => {
      list.part.remove('offline');
      list.part.toggle('stale', stale);
      if (list.parentNode !== root) fill(list);
      if (known === (known = JSON.stringify(top))) return;
      const before = items;
      items = new Map();
      top.forEach(({ page, users }, i) => {
        const item = before.get(page) ?? line(page);
        const count = /** @type {Node} */ (item.lastChild);
        const text = this.#format(users);
        if (count.textContent !== text) count.textContent = text;
        if (list.children[i] !== item) list.insertBefore(item, list.children[i] ?? null);
        items.set(page, item);
      });
      for (const [page, item] of before) if (!items.has(page)) item.remove();
      this.dispatchEvent(new CustomEvent('top', { detail: top }));
    };
    const failed = (/** @type {Error} */ error, /** @type {boolean} */ refused) => {
      if (!refused) return list.part.add('offline');
      fill(part('p', 'refused', get('refused') ?? 'This list cannot be shown here.'));
      console.error(`Headcount: <live-top>: ${error.message}`);
      this.dispatchEvent(new CustomEvent('refused', { detail: error }));
    };
    try {
      const storage = /** @type {'none' | undefined} */ (get('storage'));
      signal.addEventListener(
        'abort',
        watchTop(show, { n: Number(get('n') ?? 10), failed, server: get('server'), storage }),
      );
    } catch (/** @type {any} */ error) {
      console.error(error.message); // the address of the server is none
    }
  }

  #format(/** @type {number} */ users) {
    try {
      return users.toLocaleString(this.closest('[lang]')?.getAttribute('lang') || undefined);
    } catch {
      return users.toLocaleString(); // that is not a valid language tag
    }
  }
}

define('live-top', LiveTop, LiveTop.observedAttributes);

// @ts-check
// One connection to the server: a WebSocket, or what rescue.js makes instead.

const HEARTBEAT_MS = 15_000; // until the server's welcome names another interval
const PATIENCE_MS = 5_000; // how long a heartbeat may stay without an answer

// What can be watched is a topic: a page, or a counter that lasts, whose topic is its
// key after a tab, which no page has.
export const COUNTER = '\t';

/** @typedef {any} Frame */

export const MAX_PAGES = 100; // the server's bound for one connection

/** The topic that an error frame is about, if the server refused the frame because of it. */
export const refused = (/** @type {Frame} */ { code, page, counter }) => (counter ? COUNTER + counter : code && page);

/** @typedef {ReturnType<typeof Link>} Link */
/**
 * One WebSocket, or its replacement. It checks that the server still answers.
 * @param {WebSocket} socket
 * @param {{_opened(): void, _frame(frame: Frame): void, _ended(): void}} events
 */
export function Link(socket, events) {
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
    // Values that other tabs have received, and a tab that came later has not. A link that is paused brings none.
    /** @type {Set<string>} */ _owed: new Set(),
    /** @type {any} */ _again: 0, // while something that was refused waits to be sent again
    _heartbeat: HEARTBEAT_MS,

    _send(/** @type {object} */ frame) {
      if (link._open) socket.send(JSON.stringify(frame));
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
      link._open = false;
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

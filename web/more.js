// @ts-check
// What only some pages need; headcount.js loads this file when they do: changes of
// counters that last, the elements <live-counter> and <like-button>, and loops over
// counts.
//
//   <live-counter key="views:42">   shows a counter
//     increment     adds one for this visit, if the counter's rule opens that to everyone
//     announce="…"  what a screen reader says now and then; default: nothing
//
//   <like-button key="likes:42">    shows how many members a counter has; a click
//                                   makes the user one of them, or no longer
//     label="…"     what the button is called; default "Like"
//     announce="…"  what a screen reader says now and then; {count} is the number
//     refused="…"   what it says when a click was in vain
//
// Libraries whose JSX keeps key="…" for itself write counter="…". Both take format="full". An event `counter` follows each change, with the counter as
// it is shown; an event `refused` each click in vain, with the error. The content of a
// <like-button> takes the place of the heart. Style it with ::part(button),
// ::part(pressed), ::part(count) and --headcount-like.

const PATIENCE_MS = 10_000; // how long a change may take

/** @typedef {import('./headcount.js').Headcount} Headcount */
/** @typedef {import('./headcount.js').CounterValue} CounterValue */
/** @typedef {import('./live.js').Parts} Parts */

/**
 * Changes a counter, and says the answer to all who watch it in this tab.
 * @param {string} method PUT and DELETE: the user is a member, or is not; POST adds one
 * @param {string} key
 * @param {URL} base of the server
 * @param {string | undefined} token
 * @param {boolean} keep whether the user's id may be stored
 * @param {(origin: string, keep: boolean, id?: string) => string | undefined} idOf
 * @param {(frame: any) => void} hear
 * @returns {Promise<CounterValue>}
 */
export async function change(method, key, base, token, keep, idOf, hear) {
  /** @type {Record<string, string>} */ const headers = {};
  const id = idOf(base.origin, keep);
  if (token) headers.Authorization = `Bearer ${token}`;
  else if (id) headers['Headcount-Id'] = id;
  const path = `api/v1/counters/${encodeURIComponent(key)}/${method === 'POST' ? 'increment' : 'members/me'}`;
  const answer = await fetch(new URL(path + base.search, base), {
    method,
    headers,
    credentials: keep ? 'include' : 'omit',
    cache: 'no-store',
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  const issued = answer.headers.get('Headcount-Id');
  if (issued && !token) idOf(base.origin, keep, issued);
  const said = await answer.json().catch(() => ({})); // an error of a proxy may be no JSON
  if (!answer.ok)
    throw Object.assign(new Error(said.detail ?? said.title ?? `The server answered with status ${answer.status}.`), { status: answer.status });
  const { member, ...counter } = said;
  if (member) counter.mine = true;
  hear({ type: 'counter', ...counter });
  return counter;
}

/**
 * Keeps the newest value of each page until the loop takes it.
 * @param {Headcount} headcount
 * @param {(callback: (value: any) => void) => () => void} subscribe
 */
export async function* iterate(headcount, subscribe) {
  const fresh = new Map();
  let wake = () => {};
  const next = () => wake();
  const stop = subscribe((value) => {
    fresh.set(value.page, value);
    next();
  });
  headcount.addEventListener('state', next);
  try {
    while (headcount.state !== 'closed') {
      for (const [page, value] of fresh) {
        fresh.delete(page);
        yield value;
      }
      await new Promise((resolve) => (wake = () => resolve(0)));
    }
  } finally {
    headcount.removeEventListener('state', next);
    stop();
  }
}

/**
 * <live-counter> and <like-button>.
 * @param {Parts} parts
 */
export default function begin(parts) {
  const { element, headcount, show, signal } = parts;
  const key = element.getAttribute('key') ?? element.getAttribute('counter') ?? '';
  const counter = headcount.counter(key);
  const complain = (/** @type {any} */ error) => console.error(`Headcount: ${key}: ${error.message}`);
  // What a page shows is up to its author, who looks here when it shows nothing.
  headcount.addEventListener('error', (/** @type {any} */ { detail }) => detail.counter === key && complain(detail), { signal });
  const told =
    element.localName === 'like-button'
      ? likes(parts, counter)
      : (/** @type {CounterValue} */ now) => show(now.value, 'counter', now, '');
  signal.addEventListener('abort', counter.watch(told));
  if (element.hasAttribute('increment')) visit(headcount, key).catch(complain);
}

/** @type {WeakMap<Headcount, Set<string>>} */ const visited = new WeakMap(); // the counters that this visit was added to: those of the page's elements

/** Adds one to a counter, once for each time that the page is loaded and seen. */
async function visit(/** @type {Headcount} */ headcount, /** @type {string} */ key) {
  const keys = visited.get(headcount) ?? new Set();
  visited.set(headcount, keys);
  if (keys.has(key)) return;
  keys.add(key);
  // A browser may load a page that the user then does not open.
  const page = /** @type {any} */ (document);
  if (page.prerendering) await new Promise((seen) => page.addEventListener('prerenderingchange', seen, { once: true }));
  await headcount.counter(key).increment();
}

/** @type {CSSStyleSheet | undefined} */ let sheet;

/**
 * Puts the number of a <like-button> on a button. Returns what takes the counter.
 *
 * A click shows at once: `wish` is what the user asked for last, and holds until the
 * server has answered the request for it. One request is under way at a time. Without
 * a wish the button shows what the server says, so a refusal needs no undoing.
 * @param {Parts} parts
 * @param {import('./headcount.js').CounterHandle} counter
 */
function likes({ element, root, number, show, say, signal }, counter) {
  const button = number.closest('button') ?? draw(root, number);
  const label = () => element.getAttribute('label') ?? 'Like';
  /** @type {CounterValue | undefined} */ let now;
  /** @type {boolean | undefined} */ let wish;
  let asking = false;

  const paint = () => {
    if (!now || signal.aborted) return;
    const mine = wish ?? now.mine ?? false;
    const value = now.value + (mine === !!now.mine ? 0 : mine ? 1 : -1);
    button.disabled = false;
    button.setAttribute('aria-pressed', `${mine}`);
    button.part.toggle('pressed', mine);
    show(value, 'counter', { ...now, value, mine }, '{count} likes');
    button.setAttribute('aria-label', `${label()}: ${number.textContent}`);
  };
  const ask = async () => {
    asking = true;
    while (wish !== undefined) {
      const asked = wish;
      try {
        await counter[asked ? 'add' : 'remove']();
      } catch (/** @type {any} */ error) {
        wish = undefined; // also what was asked for meanwhile: it would be refused as well
        paint();
        say(element.getAttribute('refused') ?? 'That could not be saved.');
        element.dispatchEvent(new CustomEvent('refused', { detail: error }));
      }
      if (wish === asked) wish = undefined;
    }
    asking = false;
    paint();
  };
  button.disabled = true; // until it is known whether the user is a member
  button.setAttribute('aria-label', label());
  button.addEventListener(
    'click',
    () => {
      if (!now) return;
      wish = !(wish ?? now.mine);
      paint();
      if (!asking) ask();
    },
    { signal },
  );
  return (/** @type {CounterValue} */ newest) => {
    now = newest;
    paint();
  };
}

/** Draws the button around the number. */
function draw(/** @type {ShadowRoot} */ root, /** @type {HTMLElement} */ number) {
  if (!sheet) {
    sheet = new CSSStyleSheet();
    sheet.replaceSync(`
      button { all: unset; display: inline-flex; align-items: baseline; gap: .35em; cursor: pointer; }
      svg, ::slotted(*) { align-self: center; }
      button:disabled { cursor: default; }
      button:focus-visible { outline: 2px solid; outline-offset: 2px; border-radius: 4px; }
      svg { width: 1.25em; height: 1.25em; fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
      [aria-pressed=true] svg { fill: var(--headcount-like, #c8102e); stroke: var(--headcount-like, #c8102e); }
    `);
  }
  root.adoptedStyleSheets.push(sheet);
  const svg = (/** @type {string} */ name, /** @type {Record<string, string>} */ attributes) => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
    return made;
  };
  const icon = svg('svg', { viewBox: '0 0 24 24', 'aria-hidden': 'true' });
  icon.append(svg('path', { d: 'M12 20.5 4 12.6a5 5 0 0 1 7-7.1l1 1 1-1a5 5 0 0 1 7 7.1z' }));
  const slot = document.createElement('slot'); // content of the site replaces the heart
  slot.append(icon);
  const button = document.createElement('button');
  button.setAttribute('part', 'button');
  button.type = 'button';
  root.prepend(button);
  button.append(slot, number);
  return button;
}

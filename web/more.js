// @ts-check
// What only some pages need; headcount.js loads this file when they do: changes of
// counters that last, follows, the elements <live-counter>, <like-button> and
// <follow-button>, and loops over counts.
//
//   <live-counter counter="views:42">   shows a counter
//     increment     adds one for this visit, if the counter's rule opens that to everyone
//     announce="…"  what a screen reader says, at most once a minute; default: nothing
//
//   <like-button counter="likes:42">    shows how many members a counter has; a click
//                                       makes the user one of them, or no longer
//     label="…"     what the button is called; default "Like"
//     announce="…"  what a screen reader says; {count} is the number
//     refused="…"   what it says when a click was in vain
//
//   <follow-button page="pricing">  has the user follow a page, or no longer
//     label="…"     the word on the button; default "Follow"
//     refused="…"   as above
//
// In plain HTML counter="…" may be called key="…", which many libraries keep for themselves. The elements of counters
// take format="full". An event `counter` follows each change, with the counter as it is shown, and an event `follow`
// each change of a follow; an event `refused` each click in vain, with the error. The content of a <like-button> takes
// the place of the heart, that of a <follow-button> the place of its word. Style them with ::part(button),
// ::part(pressed), ::part(count), --headcount-like and --headcount-follow.

const COUNTER = '\t'; // a counter's topic is its key after this; a page is its own topic
const PATIENCE_MS = 10_000; // how long a change may take
const AGAIN_MS = 30_000; // until follows are asked for again, if the server could not say them

/** @typedef {import('./headcount.js').Headcount} Headcount */
/** @typedef {import('./headcount.js').CounterValue} CounterValue */
/** @typedef {import('./live.js').Parts} Parts */
/** @typedef {(base: URL, keep: boolean, id?: string) => string | undefined} IdOf */

/**
 * A request of this user.
 * @param {string} path
 * @param {string} method
 * @param {URL} base of the server
 * @param {string | undefined} token
 * @param {boolean} keep whether the user's id may be stored
 * @param {IdOf} idOf
 * @returns {Promise<any>} what the answer says; an answer that refuses is an error with its status
 */
async function request(path, method, base, token, keep, idOf) {
  /** @type {Record<string, string>} */ const headers = {};
  const id = idOf(base, keep);
  if (token) headers.Authorization = `Bearer ${token}`;
  else if (id) headers['Headcount-Id'] = id;
  const url = new URL(path, base);
  for (const [name, value] of base.searchParams) url.searchParams.set(name, value);
  // a frame of another site
  if (keep && id && base.origin === location.origin) url.searchParams.set('storage', 'partitioned');
  const answer = await fetch(url, {
    method,
    headers,
    credentials: keep ? 'include' : 'omit',
    cache: 'no-store',
    signal: AbortSignal.timeout?.(PATIENCE_MS), // Chromium before 103 waits as long as it likes
  });
  const issued = answer.headers.get('Headcount-Id');
  if (issued && !token) idOf(base, keep, issued);
  const said = answer.status === 204 ? {} : await answer.json().catch(() => null); // that of a proxy may be no JSON
  if (!answer.ok)
    throw Object.assign(new Error(said?.detail ?? said?.title ?? `The server answered with status ${answer.status}.`), {
      status: answer.status,
    });
  // Without a status, since this says nothing about the call: it may be made again after a log-in.
  if (!said) throw new Error('What answered is no Headcount server. Does a proxy before it want a log-in?');
  return said;
}

/**
 * Makes a call of this user.
 * @param {string} method
 * @param {string | undefined} topic a counter that lasts, or what the user follows: one page, or all
 * @param {[base: URL, token: string | undefined, keep: boolean, idOf: IdOf, hear: (frame: any) => void]} who
 */
export const call = (method, topic, ...who) =>
  topic?.startsWith(COUNTER) ? change(method, topic.slice(1), ...who) : follow(method, topic, ...who);

/**
 * Changes a counter, and says the answer to all who watch it in this tab.
 * @param {string} method PUT and DELETE: the user is a member, or is not; POST adds one
 * @param {string} key
 * @param {URL} base
 * @param {string | undefined} token
 * @param {boolean} keep
 * @param {IdOf} idOf
 * @param {(frame: any) => void} hear
 * @returns {Promise<CounterValue>}
 */
async function change(method, key, base, token, keep, idOf, hear) {
  const path = `api/v1/counters/${encodeURIComponent(key)}/${method === 'POST' ? 'increment' : 'members/me'}`;
  const { member, ...counter } = await request(path, method, base, token, keep, idOf);
  if (member) counter.mine = true;
  hear({ type: 'counter', ...counter });
  return counter;
}

/**
 * Changes what the user follows, or lists it.
 * @param {string} method PUT: from now on; DELETE: no more; GET: lists
 * @param {string | undefined} page none: lists
 * @param {URL} base
 * @param {string | undefined} token
 * @param {boolean} keep
 * @param {IdOf} idOf
 * @param {(frame: any) => void} hear
 */
async function follow(method, page, base, token, keep, idOf, hear) {
  const ask = (/** @type {string} */ rest) => request(`-/me/follows${rest}`, method, base, token, keep, idOf);
  if (page !== undefined) {
    await ask(`/${encodeURIComponent(page)}`);
    hear({ type: 'follow', page, followed: method === 'PUT' });
    return;
  }
  /** @type {string[]} */ const all = [];
  for (let after = ''; after !== undefined;) {
    const { follows, next } = await ask(after && `?after=${encodeURIComponent(after)}`);
    all.push(...follows);
    after = next;
  }
  return all;
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
    for (;;) {
      for (const [page, value] of fresh) {
        fresh.delete(page);
        yield value;
      }
      if (headcount.state === 'closed') return; // perhaps by whoever took the values
      await new Promise((resolve) => (wake = () => resolve(0)));
    }
  } finally {
    headcount.removeEventListener('state', next);
    stop();
  }
}

/**
 * <live-counter>, <like-button> and <follow-button>.
 * @param {Parts} parts
 */
export default function begin(parts) {
  const { element, headcount, show, forget, refuse, signal } = parts;
  if (element.localName === 'follow-button') return follows(parts);
  const key = element.getAttribute('key') ?? element.getAttribute('counter') ?? '';
  const counter = headcount.counter(key);
  let stop = () => {};
  let refused = false;
  // What a page shows is up to its author, who looks here when it shows nothing.
  headcount.addEventListener(
    'error',
    (/** @type {any} */ { detail }) => {
      if (detail.counter !== key) return;
      refused = true;
      refuse(`${key}: ${detail.message}`);
    },
    { signal },
  );
  const told =
    element.localName === 'like-button'
      ? likes(parts, counter)
      : (/** @type {CounterValue} */ now) => show(now.value, 'counter', now, '');
  if (!key) return refuse(`<${element.localName}> has no counter; name it in counter="…"`);
  const watch = () => {
    stop();
    refused = false;
    stop = counter.watch(told);
  };
  // The next user may see what this one may not.
  const again = () => {
    if (!refused) return;
    forget();
    watch();
  };
  try {
    watch();
    signal.addEventListener('abort', () => stop());
    headcount.addEventListener('user', again, { signal });
  } catch (/** @type {any} */ error) {
    return refuse(error);
  }
  if (/** @type {any} */ (element).increment)
    visit(headcount, key).catch((error) => console.error(`Headcount: ${key}: ${error.message}`));
}

// the counters that this visit was added to: those of the page's elements
/** @type {WeakMap<Headcount, Set<string>>} */ const visited = new WeakMap();

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

/**
 * Has clicks on a button set something of the user's, and unset it.
 *
 * A click shows at once: `wish` is what the user asked for last, and holds until the
 * server has answered the request for it. One request is under way at a time. Without
 * a wish the button shows what the server says, so a refusal needs no undoing.
 * @param {Parts} parts
 * @param {HTMLButtonElement} button
 * @param {string} label what the button is called at first
 * @param {() => boolean | undefined} said what the server says; undefined: nothing yet
 * @param {(on: boolean) => Promise<unknown>} ask
 * @param {(on: boolean) => void} paint shows the rest of it
 * @returns {() => void} paints what the server says now
 */
function toggle({ element, headcount, say, signal }, button, label, said, ask, paint) {
  /** @type {boolean | undefined} */ let wish;
  let asking = false;
  const update = () => {
    const on = wish ?? said();
    if (signal.aborted) return;
    button.disabled = on === undefined; // until the server has said something, of this user
    button.setAttribute('aria-pressed', `${!!on}`);
    button.part.toggle('pressed', !!on);
    if (on !== undefined) paint(on);
  };
  const askAll = async () => {
    asking = true;
    while (wish !== undefined) {
      const asked = wish;
      try {
        await ask(asked);
      } catch (/** @type {any} */ error) {
        wish = undefined; // also what was asked for meanwhile: it would be refused as well
        update();
        say(element.getAttribute('refused') ?? 'That could not be saved.');
        element.dispatchEvent(new CustomEvent('refused', { detail: error }));
      }
      if (wish === asked) wish = undefined;
    }
    asking = false;
    update();
  };
  // What the user asked for is not asked for in the name of the next one.
  const other = () => {
    wish = undefined;
    update();
  };
  headcount.addEventListener('user', other, { signal });
  button.disabled = true;
  button.setAttribute('aria-label', label);
  button.addEventListener(
    'click',
    () => {
      const on = wish ?? said();
      if (on === undefined) return;
      wish = !on;
      update();
      if (!asking) askAll();
    },
    { signal },
  );
  return update;
}

/**
 * Puts the number of a <like-button> on a button. Returns what takes the counter.
 * @param {Parts} parts
 * @param {import('./headcount.js').CounterHandle} counter
 */
function likes(parts, counter) {
  const { element, number, show, refuse } = parts;
  const button = number.closest('button') ?? draw(parts, HEART);
  const label = () => element.getAttribute('label') ?? 'Like';
  /** @type {CounterValue | undefined} */ let now;
  const update = toggle(
    parts,
    button,
    label(),
    () => now && !!now.mine,
    (on) => counter[on ? 'add' : 'remove'](),
    (mine) => {
      if (!now) return;
      const value = now.value + (mine === !!now.mine ? 0 : mine ? 1 : -1);
      show(value, 'counter', { ...now, value, mine }, '{count} likes');
      button.setAttribute('aria-label', `${label()}: ${number.textContent}`);
    },
  );
  return (/** @type {CounterValue} */ newest) => {
    if (newest.kind !== 'members')
      return refuse(
        `<like-button counter="${newest.key}"> needs a counter of the kind members, and this one is of the kind ${newest.kind}. ` +
          'Use a key whose rule says members, such as likes:42, or show the number in a <live-counter>',
      );
    now = newest;
    update();
  };
}

/**
 * Calls back with whether the user follows a page: at every connection, since other tabs
 * may have changed it, and after each change of this document. Of another user that is
 * unknown at first.
 * @param {Headcount} headcount
 * @param {string} page
 * @param {(followed: boolean | undefined) => void} callback
 * @param {(error: any) => void} complain
 * @param {AbortSignal} signal ends it
 */
export function followed(headcount, page, callback, complain, signal) {
  let changes = 0;
  /** @type {any} */ let again; // timer
  const load = async () => {
    clearTimeout(again);
    if (headcount.state !== 'open') return;
    const before = changes;
    try {
      const all = await headcount.follows();
      // else what is listed is older than the change
      if (before === changes && !signal.aborted) callback(all.includes(page));
    } catch (/** @type {any} */ error) {
      if (signal.aborted) return;
      complain(error);
      // A refusal would be the same again.
      if (!(error.status < 500) || error.status === 429) again = setTimeout(load, AGAIN_MS);
    }
  };
  signal.addEventListener('abort', () => clearTimeout(again));
  headcount.addEventListener('state', load, { signal });
  // that of another user is loaded with the next connection
  const other = () => {
    changes++;
    callback(undefined);
  };
  headcount.addEventListener('user', other, { signal });
  headcount.addEventListener(
    'follow',
    (/** @type {any} */ { detail }) => {
      if (detail.page !== page) return;
      changes++;
      callback(detail.followed);
    },
    { signal },
  );
  signal.addEventListener(
    'abort',
    headcount.unread(() => {}),
  ); // there is a connection
  load();
}

/**
 * <follow-button>: a bell, a word, and whether the user follows the page.
 * @param {Parts} parts
 */
function follows(parts) {
  const { element, headcount, number, fitting, signal } = parts;
  const page = fitting(element.getAttribute('page') ?? '');
  const complain = (/** @type {any} */ error) => console.error(`Headcount: <follow-button>: ${page}: ${error.message}`);
  if (!page) return console.error('Headcount: a <follow-button> needs a page, such as page="pricing".');
  const label = element.getAttribute('label') ?? 'Follow';
  number.part.add('label');
  /** @type {any} */ (number.firstChild).textContent = label; // the slot; content of the site replaces the word
  const button = number.closest('button') ?? draw(parts, BELL);
  /** @type {boolean | undefined} */ let now;
  const update = toggle(parts, button, label, () => now, (on) => headcount[on ? 'follow' : 'unfollow'](page), () => {});
  /** @type {boolean | undefined} */ let shown;
  const told = (/** @type {boolean | undefined} */ yes) => {
    const before = shown;
    shown = before === undefined ? yes : !!yes; // what is not known of the next user is shown as not followed
    if (before !== undefined && shown !== before)
      element.dispatchEvent(new CustomEvent('follow', { detail: { page, followed: shown } }));
    now = yes;
    update();
  };
  followed(headcount, page, told, complain, signal);
}

const STYLE = `
  button { all: unset; display: inline-flex; align-items: baseline; gap: .35em; box-sizing: border-box; min-width: 24px; min-height: 24px; padding-block: max(0px, 12px - .625em); cursor: pointer; }
  svg, ::slotted(*) { align-self: center; }
  button:disabled { cursor: default; }
  button:focus-visible { outline: 2px solid; outline-offset: 2px; border-radius: 4px; }
  svg { width: 1.25em; height: 1.25em; fill: none; stroke: currentColor; stroke-width: 2; stroke-linecap: round; stroke-linejoin: round; }
  [aria-pressed=true] svg { fill: var(--colour); stroke: var(--colour); }
  .heart { --colour: var(--headcount-like, #c8102e); }
  .bell { --colour: var(--headcount-follow, currentColor); }
`;

const HEART = { name: 'heart', d: 'M12 20.5 4 12.6a5 5 0 0 1 7-7.1l1 1 1-1a5 5 0 0 1 7 7.1z' };
const BELL = { name: 'bell', d: 'M6 9a6 6 0 0 1 12 0c0 7 3 8 3 8H3s3-1 3-8M10 21a2 2 0 0 0 4 0' };

/**
 * Draws the button around the number, with an icon.
 * @param {Parts} parts
 * @param {{name: string, d: string}} icon
 */
function draw({ root, number, dress }, { name, d }) {
  dress(root, STYLE);
  const svg = (/** @type {string} */ name, /** @type {Record<string, string>} */ attributes) => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
    return made;
  };
  const icon = svg('svg', { viewBox: '0 0 24 24', 'aria-hidden': 'true', class: name });
  icon.append(svg('path', { d }));
  const slot = document.createElement('slot'); // content of the site replaces the heart
  slot.append(icon);
  const button = document.createElement('button');
  button.setAttribute('part', 'button');
  button.type = 'button';
  root.prepend(button);
  button.append(name === 'heart' ? slot : icon, number); // that of a bell replaces the word
  return button;
}

// @ts-check
// The list of an <unread-bell>: the newest pages with unread changes. bell.js loads this
// file when somebody opens it.

const PATIENCE_MS = 10_000; // how long a call may take

/** @typedef {{page: string, count: number, updated_at: string, title?: string, url?: string}} Notification */

const STYLE = `
  [part~=list] {
    position: fixed; z-index: 1000; inset: auto; margin: .5em 0; width: max-content; max-width: min(22em, 90vw); overflow: auto;
    box-sizing: border-box; padding: .25em; border: 1px solid color-mix(in srgb, currentColor 25%, transparent); border-radius: 8px;
    background: var(--headcount-list, Canvas); color: var(--headcount-list-ink, CanvasText); font: 14px/1.4 system-ui, sans-serif; text-align: start; box-shadow: 0 4px 16px #0003;
  }
  [part~=list] ul { margin: 0; padding: 0; list-style: none; }
  [part~=item], [part~=all] { all: unset; display: block; box-sizing: border-box; width: 100%; padding: .5em .75em; border-radius: 6px; cursor: pointer; overflow-wrap: anywhere; }
  [part~=item]:hover, [part~=all]:hover { background: color-mix(in srgb, currentColor 8%, transparent); }
  [part~=item]:focus-visible, [part~=all]:focus-visible { outline: 2px solid; outline-offset: -2px; }
  [part~=all] { text-align: center; font-weight: 600; }
  [part~=when] { display: block; opacity: .7; font-size: .85em; }
  [part~=none] { margin: .5em .75em; }
`;

// Where the browser can, it places the list: at the bell's end, else at its start, else in the middle; below or above,
// where there is more room.
const ANCHORED = `
  [part~=button] { anchor-name: --headcount-bell; }
  [part~=list] {
    position-anchor: --headcount-bell; position-area: self-block-end span-self-inline-start; max-height: min(70vh, 100% - 1em);
    position-try: most-block-size flip-inline, self-block-end span-all, flip-block, flip-block flip-inline, self-block-start span-all;
  }`;

/**
 * Places the list in a browser that cannot.
 * @param {HTMLElement} list
 * @param {HTMLElement} button
 */
function place({ style, offsetWidth }, button) {
  const { left, right, top, bottom } = button.getBoundingClientRect();
  const { clientWidth, clientHeight } = document.documentElement;
  const ends = getComputedStyle(button).direction === 'rtl' ? left : right - offsetWidth;
  const room = clientHeight - bottom;
  style.left = `${Math.max(0, Math.min(ends, clientWidth - offsetWidth))}px`;
  style.top = room < top ? 'auto' : `${bottom}px`;
  style.bottom = room < top ? `${clientHeight - top}px` : 'auto';
  style.maxHeight = `min(70vh, ${Math.max(room, top)}px - 1em)`;
}

/**
 * A call on the notifications of the user.
 * @param {string} method
 * @param {string} page empty: of all
 * @param {URL} base of the server
 * @param {string | undefined} token
 * @param {boolean} keep whether the user's id may be stored
 * @param {(base: URL, keep: boolean) => string | undefined} idOf
 */
async function call(method, page, base, token, keep, idOf) {
  const id = idOf(base, keep);
  const answer = await fetch(
    new URL(`-/me/notifications${page && `/${encodeURIComponent(page)}`}${base.search}`, base),
    {
      method,
      headers: token ? { Authorization: `Bearer ${token}` } : id ? { 'Headcount-Id': id } : {},
      credentials: keep ? 'include' : 'omit',
      cache: 'no-store',
      keepalive: method === 'DELETE', // the page may be about to be left
      signal: AbortSignal.timeout?.(PATIENCE_MS), // Chromium before 103 waits as long as it likes
    },
  );
  if (!answer.ok) throw new Error(`The server answered with status ${answer.status}.`);
  const said = answer.status === 204 || (await answer.json().catch(() => null));
  if (!said) throw new Error('What answered is no Headcount server. Does a proxy before it want a log-in?');
  return said;
}

/** An address that a click may lead to: of the web, and no script. */
function web(/** @type {string | undefined} */ url) {
  try {
    const { href, protocol } = new URL(url ?? '', url === undefined ? undefined : document.baseURI);
    return /^https?:$/.test(protocol) ? href : undefined;
  } catch {
    return undefined;
  }
}

/**
 * Opens the list of a bell, or closes it.
 * @param {import('./live.js').Parts} parts
 * @param {HTMLElement} button of the bell
 */
export default function toggle({ element, headcount, root, dress, say, language, signal }, button) {
  const open = root.querySelector('[part~=list]');
  if (open) return void open.dispatchEvent(new Event('close'));
  const anchored = CSS.supports('position-area', 'self-block-end span-self-inline-start');
  dress(root, STYLE);
  if (anchored) dress(root, ANCHORED);

  const word = (/** @type {string} */ name, /** @type {string} */ otherwise) => element.getAttribute(name) ?? otherwise;
  /** Makes a node with a part of its own. */
  const make = (/** @type {string} */ tag, /** @type {string} */ part, text = '') => {
    const node = document.createElement(tag);
    node.setAttribute('part', part);
    node.textContent = text;
    return node;
  };
  const list = make('div', 'list');
  list.setAttribute('role', 'dialog');
  list.setAttribute('aria-label', word('label', 'Notifications'));
  list.setAttribute('aria-busy', 'true');
  list.tabIndex = -1;
  list.popover = 'manual'; // above everything, so that nothing cuts it off
  const ended = new AbortController();
  const options = { signal: ended.signal };

  const close = (focus = true) => {
    if (ended.signal.aborted) return;
    ended.abort();
    const within = root.activeElement && list.contains(root.activeElement);
    list.remove();
    button.setAttribute('aria-expanded', 'false');
    if (focus && within) button.focus();
  };
  const choices = () => /** @type {HTMLElement[]} */ ([...list.querySelectorAll('[part~=item],[part~=all]')]);

  /** Marks a page as read; the server tells all tabs the new number. */
  const read = (/** @type {string} */ page) => {
    headcount.lend(call, 'DELETE', page).catch(fail);
    element.dispatchEvent(new CustomEvent('read', { detail: page }));
  };
  const fail = (/** @type {any} */ error) => {
    console.error(`Headcount: notifications: ${error.message}`);
    say(word('failed', 'The notifications could not be loaded.'));
  };
  const item = (/** @type {Notification} */ { page, count, updated_at, title, url }) => {
    const href = web(url);
    const line = make(href ? 'a' : 'button', 'item', title || page);
    if (href) line.setAttribute('href', href);
    const when = new Date(updated_at).toLocaleString(language(), { dateStyle: 'medium', timeStyle: 'short' });
    line.append(make('span', 'when', count > 1 ? `${when} · ${count}` : when));
    line.addEventListener('click', () => {
      read(page);
      if (href) return close();
      const all = choices();
      const next = all[all.indexOf(line) + 1];
      row.remove();
      next?.focus();
    });
    const row = document.createElement('li');
    row.append(line);
    return row;
  };
  const show = (/** @type {Notification[]} */ notifications) => {
    const at = choices().indexOf(/** @type {HTMLElement} */ (root.activeElement));
    const lines = document.createElement('ul');
    lines.append(...notifications.map(item));
    const all = make('button', 'all', word('all', 'Mark all as read'));
    all.addEventListener('click', () => {
      headcount.read();
      element.dispatchEvent(new CustomEvent('read'));
      close();
    });
    list.replaceChildren(...(notifications.length ? [lines, all] : [make('p', 'none', word('none', 'Nothing new'))]));
    list.setAttribute('aria-busy', 'false');
    // Who was in the list stays there, at the same place.
    if (at >= 0 || root.activeElement === list || !root.activeElement) (choices()[Math.max(at, 0)] ?? list).focus();
  };

  // One call at a time; the newest number is always followed by a call.
  let asking = false;
  let again = false;
  const load = async () => {
    again = true;
    if (asking) return;
    asking = true;
    while (again && !ended.signal.aborted) {
      again = false;
      try {
        const { notifications } = await headcount.lend(call, 'GET', '');
        if (!again && !ended.signal.aborted) show(notifications);
      } catch (error) {
        if (ended.signal.aborted) break;
        list.replaceChildren(make('p', 'none', word('failed', 'The notifications could not be loaded.')));
        list.setAttribute('aria-busy', 'false');
        fail(error);
      }
    }
    asking = false;
  };

  list.addEventListener('close', () => close(), options);
  list.addEventListener(
    'keydown',
    (event) => {
      const all = choices();
      const at = all.indexOf(/** @type {HTMLElement} */ (root.activeElement));
      /** @type {Record<string, number>} */
      const to = {
        ArrowDown: (at + 1) % all.length,
        ArrowUp: (at < 1 ? all.length : at) - 1,
        Home: 0,
        End: all.length - 1,
      };
      if (event.key === 'Escape') close();
      else if (event.key in to) all[to[event.key]]?.focus();
      else return;
      event.preventDefault();
      event.stopPropagation();
    },
    options,
  );
  // Who goes elsewhere, by the keyboard or the mouse, has done with the list.
  list.addEventListener(
    'focusout',
    ({ relatedTarget }) =>
      relatedTarget &&
      !element.contains(/** @type {Node} */ (relatedTarget)) &&
      !root.contains(/** @type {Node} */ (relatedTarget)) &&
      close(false),
    options,
  );
  document.addEventListener('pointerdown', (event) => !event.composedPath().includes(element) && close(false), options);
  button.addEventListener('keydown', (event) => event.key === 'Escape' && close(), options);
  signal.addEventListener('abort', () => close(false), options);
  ended.signal.addEventListener('abort', headcount.unread(load));
  button.setAttribute('aria-expanded', 'true');
  root.append(list);
  list.showPopover?.();
  if (!anchored) {
    const again = () => place(list, button);
    const sizes = new ResizeObserver(again); // that of the list says when it has loaded, too
    sizes.observe(list);
    ended.signal.addEventListener('abort', () => sizes.disconnect());
    addEventListener('scroll', again, { capture: true, passive: true, ...options });
    addEventListener('resize', again, options);
  }
  list.focus();
  load();
}

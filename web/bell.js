// @ts-check
// The larger half of <unread-bell>: a button with a bell, the number on it. The other
// half is in live.js; headcount.js loads both when a page has a bell.

const STYLE = `
  button { all: unset; position: relative; display: inline-flex; align-items: center; justify-content: center; min-width: 24px; min-height: 24px; cursor: pointer; }
  button:focus-visible { outline: 2px solid; outline-offset: 2px; border-radius: 4px; }
  svg { width: 1.25em; height: 1.25em; fill: none; stroke: currentColor; stroke-width: 2; stroke-linecap: round; stroke-linejoin: round; }
  [part~=count] {
    position: absolute; top: -.6em; left: 1.1em; min-width: 1.6em; padding: .05em .4em; box-sizing: border-box; border-radius: 1em;
    background: var(--headcount-badge, #c8102e); color: var(--headcount-badge-ink, #fff); font: 600 .65em/1.5 system-ui, sans-serif; text-align: center;
    outline: 1px solid transparent; /* an edge in forced colours */
  }
`;

let retry = ''; // browsers remember that a file could not be loaded, so the next attempt has another name

/**
 * Puts the number of an <unread-bell> on a button; a click opens the list, unless the page
 * prevents that.
 * @param {import('./live.js').Parts} parts
 */
export default function bell(parts) {
  const { element, headcount, number, show, signal } = parts;
  const button = number.closest('button') ?? draw(parts);
  const name = () =>
    button.setAttribute(
      'aria-label',
      `${element.getAttribute('label') ?? 'Notifications'}${number.hidden ? '' : `: ${number.textContent}`}`,
    );
  const tell = (/** @type {number} */ count) => {
    number.hidden = !count;
    show(count, 'unread', count, '{count} unread');
    name();
  };
  number.hidden = true;
  name();
  signal.addEventListener('abort', headcount.unread(tell));
  button.setAttribute('aria-haspopup', 'dialog');
  button.setAttribute('aria-expanded', 'false');
  const click = () => {
    if (!element.dispatchEvent(new CustomEvent('open', { cancelable: true }))) return;
    const file = `./list.js${retry}`;
    import(file).then(
      ({ default: toggle }) => signal.aborted || toggle(parts, button),
      (error) => {
        retry += '?1'; // for the next click
        console.error(error);
      },
    );
  };
  button.addEventListener('click', click, { signal });
}

/** Draws the button around the number. */
function draw(/** @type {import('./live.js').Parts} */ { root, number, dress }) {
  dress(root, STYLE);

  const draw = (/** @type {string} */ name, /** @type {Record<string, string>} */ attributes) => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const icon = draw('svg', { viewBox: '0 0 24 24', 'aria-hidden': 'true' });
  icon.append(draw('path', { d: 'M6 9a6 6 0 0 1 12 0c0 7 3 8 3 8H3s3-1 3-8M10 21a2 2 0 0 0 4 0' }));
  const slot = document.createElement('slot'); // content of the site replaces the bell
  slot.append(icon);
  const button = document.createElement('button');
  button.setAttribute('part', 'button');
  button.append(slot, number);
  root.prepend(button);
  return button;
}

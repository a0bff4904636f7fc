// The pages and elements on narrow screens, by keyboard and by touch, in forced colours, and in browsers of some years
// ago.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';

import { TIMEOUT, eventually, launch, open as openIn, startSite } from './browser.js';
import { Server, program } from './server.js';

const KEY = 'a key for tests alone';
const LONG = '/shop/outdoor/tents/lightweight-three-season-tents-for-two-people-with-a-porch-and-a-footprint-included';

let binary;
let server;
let browser;
let site;

before(
  async () => {
    binary = await program();
    site = await startSite(
      () => `<!doctype html><html lang="en"><meta name="viewport" content="width=device-width"><title>Elements</title>
        <script type="module" src="${server.url}/-/headcount.js"></script><script type="module" src="${server.url}/-/live-top.js"></script>
        <body style="font: 13px sans-serif"><live-count id="count" storage="none" min="1" singular="# person" other="# people"></live-count>
        <live-count id="few" storage="none" min="7" other="# people"></live-count><unread-bell storage="none"></unread-bell>
        <live-counter storage="none" counter="views:1"></live-counter><like-button storage="none" counter="likes:1"></like-button>
        <follow-button storage="none" page="p"></follow-button>`,
    );
    server = await Server.start(binary.path, [
      '--shutdown-timeout',
      '2s',
      '--api-key',
      KEY,
      '--presence-timeout',
      '1m',
      '--allow-origins',
      site.url,
    ]);
    browser = await launch();
    await Promise.all([LONG, '/a', '/a', '/b'].map((page) => server.hold(page)));
  },
  { timeout: 600_000 },
);

after(async () => {
  await browser?.close();
  site?.close();
  try {
    await server?.stop();
  } finally {
    await binary?.remove();
  }
}, { timeout: TIMEOUT });

const open = async (address, options = {}) => openIn(await browser.newContext(options), address);

/** The dashboard of a phone, with its data. */
async function dashboard(options = {}) {
  const page = await open(`${server.url}/-/dashboard#key=${encodeURIComponent(KEY)}`, {
    viewport: { width: 414, height: 800 },
    hasTouch: true,
    ...options,
  });
  await page.waitForSelector('#pages tr:nth-child(3)');
  return page;
}

test('on a phone the dashboard shows names of pages in full, and its tables are scrolled by keyboard', async () => {
  const page = await dashboard();
  const [shown, wide] = await page.evaluate((name) => {
    const button = [...document.querySelectorAll('#pages button')].find(({ textContent }) => textContent === name);
    const { clientWidth, scrollWidth } = button;
    const cell = button.closest('td');
    return [
      scrollWidth <= clientWidth &&
        cell.scrollWidth <= cell.clientWidth &&
        getComputedStyle(button).textOverflow !== 'ellipsis',
      cell.clientWidth / cell.closest('section').clientWidth,
    ];
  }, LONG);
  assert.ok(shown, 'the name is cut off');
  assert.ok(wide > 0.5, `the name has ${wide} of the width`);
  assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), 'the page scrolls sideways');

  const scrollers = await page.evaluate(() =>
    [...document.querySelectorAll('.scroll, .events')]
      .filter((one) => one.checkVisibility())
      .map((one) => one.tabIndex === 0 && !!one.getAttribute('aria-labelledby')),
  );
  assert.ok(scrollers.length >= 3 && scrollers.every(Boolean), `tables that are reached and named: ${scrollers}`);
  const table = page.locator('.scroll:has(#processes)');
  await table.focus();
  await page.keyboard.press('ArrowRight');
  await eventually(true, 'a table scrolls', () => table.evaluate((one) => one.scrollLeft > 0));
  await page.context().close();
});

test('in forced colours buttons and marks keep an edge', async () => {
  const page = await open(`${server.url}/#key=${encodeURIComponent(KEY)}`, { forcedColors: 'active' });
  await page.waitForSelector('#pages a[aria-current]');
  const bare = await page.evaluate(() => {
    const edged = (style) =>
      [style.borderTopWidth !== '0px' && style.borderTopStyle, style.outlineWidth !== '0px' && style.outlineStyle].some(
        (kind) => kind && kind !== 'none',
      );
    const all = [...document.querySelectorAll('button:not(.link), .button, #pages a[aria-current]')].filter((one) =>
      one.checkVisibility(),
    );
    const bare = all.filter((one) => !edged(getComputedStyle(one))).map(({ outerHTML }) => outerHTML);
    if (!edged(getComputedStyle(document.getElementById('state'), '::before'))) bare.push('the mark of the state');
    const badge = document.getElementById('bell').shadowRoot.querySelector('[part~=count]');
    if (!edged(getComputedStyle(badge))) bare.push('the badge of the bell');
    return bare;
  });
  assert.deepEqual(bare, []);
  await page.context().close();
});

test('every page has a main landmark', async () => {
  const html = { extraHTTPHeaders: { Accept: 'text/html' } };
  for (const [address, options] of [['/-/dashboard'], ['/p/widget'], ['/p/counter', html], ['/']]) {
    const page = await open(server.url + address, options);
    const mains = () =>
      page.evaluate(
        () =>
          [...document.querySelectorAll('main')].filter((one) => one.checkVisibility() && one.innerText.trim()).length,
      );
    await eventually(1, `${address} has a main landmark`, mains);
    if (address === '/p/widget') {
      await page.waitForLoadState('networkidle');
      assert.deepEqual(page.complaints, [], 'without an icon of its own');
    }
    await page.context().close();
  }
});

test('browsers of some years ago show the same numbers, and throw nothing', async () => {
  /** What Safari 15.4 lacks, and what Chromium 100 has otherwise. */
  const age = () => {
    delete HTMLElement.prototype.attachInternals;
    delete HTMLElement.prototype.showPopover;
    delete AbortSignal.timeout;
    delete Element.prototype.checkVisibility;
    delete ShadowRoot.prototype.adoptedStyleSheets;
    delete Document.prototype.adoptedStyleSheets;
    globalThis.CSSStyleSheet = class {
      constructor() {
        throw new TypeError('Illegal constructor');
      }
    };
  };
  const states = () => {
    const add = CustomStateSet.prototype.add;
    CustomStateSet.prototype.add = function (state) {
      if (!state.startsWith('--')) throw new DOMException("The specified value must start with '--'.", 'SyntaxError');
      return add.call(this, state);
    };
  };
  for (const prepare of [age, states]) {
    const page = await openIn(await browser.newContext(), site.url, (page) => page.addInitScript(prepare));
    const text = (name) => page.evaluate((name) => {
      const root = document.querySelector(name).shadowRoot;
      return (
        root &&
        [...root.childNodes]
          .filter(({ localName, hidden }) => localName !== 'style' && !hidden)
          .map(({ textContent }) => textContent)
          .join('')
          .trim()
      );
    }, name);
    await eventually('1 person', `${prepare.name}: it shows a sentence`, () => text('#count'));
    await eventually('', `${prepare.name}: it shows nothing under min`, () => text('#few'));
    await eventually('0', `${prepare.name}: it shows a counter`, () => text('live-counter'));
    await eventually('0', `${prepare.name}: it shows a like`, () => text('like-button'));
    // The buttons are large enough for a finger.
    await page.waitForFunction(() => document.querySelector('follow-button').shadowRoot?.querySelector('button'));
    for (const name of ['unread-bell', 'like-button', 'follow-button']) {
      const { width, height } = await page.locator(`${name} button`).first().boundingBox();
      assert.ok(Math.min(width, height) >= 24, `${name} is ${width} x ${height}`);
    }
    await page.click('like-button');
    await eventually('1', `${prepare.name}: a like counts`, () => text('like-button'));
    await page.click('like-button');
    await eventually('0', `${prepare.name}: and is taken back`, () => text('like-button'));
    await page.click('unread-bell');
    await page.waitForFunction(() => document.querySelector('unread-bell').shadowRoot.querySelector('[part~=none]'));
    assert.equal(
      await page.evaluate(
        () => getComputedStyle(document.querySelector('unread-bell').shadowRoot.querySelector('button')).cursor,
      ),
      'pointer',
    );
    assert.deepEqual(page.complaints, []);
    await page.context().close();
  }
});

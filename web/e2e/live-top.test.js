// <live-top> in a real Chromium, on a site of another origin under a strict policy.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';

import { TIMEOUT, eventually, launch, open as openIn, startSite } from './browser.js';
import { Server, program } from './server.js';

let binary;
let browser;
let site;
let server; // visitors may see the pages list/…
let closed; // visitors may see no list

before(
  async () => {
    binary = await program();
    const html = (url) => `<!doctype html><html lang="en"><title>Shop</title>
      <script type="module" src="${url.searchParams.get('from')}/-/live-top.js"></script>
      <live-top id="top" ${url.searchParams.get('attributes') ?? ''}>soon</live-top>`;
    site = await startSite(html, () => {
      const all = `${server.url} ${closed.url}`;
      const types = `require-trusted-types-for 'script'; trusted-types 'none'`;
      return { 'Content-Security-Policy': `default-src 'none'; script-src ${all}; connect-src ${all}; ${types}` };
    });
    const flags = ['--allow-origins', site.url, '--api-key', 'a key for tests alone', '--shutdown-timeout', '2s'];
    flags.push('--presence-timeout', '2m'); // holds last for three times as long: none ends while a test counts them
    server = await Server.start(binary.path, [...flags, '--public-top', 'list/*']);
    closed = await Server.start(binary.path, flags);
    browser = await launch();
  },
  { timeout: 600_000 },
);

after(async () => {
  await browser?.close();
  site?.close();
  try {
    await server?.stop();
    await closed?.stop();
  } finally {
    await binary?.remove();
  }
}, { timeout: TIMEOUT });

const open = async (from, attributes = '') =>
  openIn(await browser.newContext(), `${site.url}/?${new URLSearchParams({ from: from.url, attributes })}`);

/** What a reader sees. */
const shown = (page) =>
  page.evaluate(() => {
    const element = document.getElementById('top');
    const root = element.shadowRoot;
    if (!root || root.querySelector('slot')) return element.textContent;
    return [...root.querySelectorAll('[part=item], [part=refused]')].map((item) => item.textContent).join(', ');
  });
const expectShown = (page, want) => eventually(want, 'the element shows', () => shown(page));

/** Hides the tab, as far as its scripts see, or shows it again. */
const hide = (page, hidden) =>
  page.evaluate((hidden) => {
    Object.defineProperty(document, 'hidden', { configurable: true, value: hidden });
    document.dispatchEvent(new Event('visibilitychange'));
  }, hidden);

test('the list is live and changes what has changed, while it is seen, and is offline without the server', async () => {
  await server.hold('secret');
  const leave = await server.hold('list/a');
  const page = await open(server, 'n="2" label="Hot"');
  await expectShown(page, 'list/a 1');
  await page.evaluate(() => {
    const element = document.getElementById('top');
    window.item = element.shadowRoot.querySelector('li');
    window.changes = 0;
    element.addEventListener('top', ({ detail }) => (window.last = detail.map(({ page }) => page).join()));
    const changes = new MutationObserver((all) => (window.changes += all.length));
    changes.observe(window.item, { subtree: true, childList: true, characterData: true });
  });
  for (let i = 0; i < 3; i++) await server.hold('list/b');
  await expectShown(page, 'list/b 3, list/a 1');
  await server.hold('list/c');
  await server.hold('list/c');
  await expectShown(page, 'list/b 3, list/c 2');
  await leave();
  assert.equal(await page.evaluate(() => window.last), 'list/b,list/c');
  assert.equal(await page.evaluate(() => window.changes), 0, 'the number of list/a was always 1');
  assert.equal(await page.evaluate(() => window.item.isConnected), false);
  assert.ok(await page.getByRole('list', { name: 'Hot' }).isVisible());
  await page.evaluate(() => document.getElementById('top').setAttribute('n', '1'));
  await expectShown(page, 'list/b 3');
  assert.deepEqual(page.complaints, []);

  // A tab that cannot be seen has no stream.
  await eventually(1, 'streams', () => server.connections());
  await hide(page, true);
  await eventually(0, 'streams', () => server.connections());
  await server.hold('list/b');
  await hide(page, false);
  await expectShown(page, 'list/b 4');

  // The list comes back with the server.
  const offline = () =>
    page.evaluate(() => document.getElementById('top').shadowRoot.querySelector('ol').part.contains('offline'));
  assert.equal(await offline(), false);
  await server.stop();
  await eventually(true, 'offline', offline);
  assert.equal(await shown(page), 'list/b 4');
  await server.run();
  await server.hold('list/new');
  await expectShown(page, 'list/new 1');
  assert.equal(await offline(), false);

  await page.evaluate(() => document.getElementById('top').remove());
  await eventually(0, 'streams', () => server.connections());
  await page.context().close();
});

test('a server that shows visitors no list says so, once', async () => {
  const page = await open(closed, 'refused="Not for you."');
  await expectShown(page, 'Not for you.');
  assert.ok(page.complaints.some((said) => /<live-top>: .*--public-top/.test(said)), `${page.complaints}`);
  await page.evaluate(() => {
    const element = document.getElementById('top');
    window.refused = new Promise((refused) => {
      element.addEventListener('refused', ({ detail }) => refused(detail.status));
    });
    element.removeAttribute('refused');
  });
  assert.equal(await page.evaluate(() => window.refused), 401);
  await expectShown(page, 'This list cannot be shown here.');
  await page.context().close();
});

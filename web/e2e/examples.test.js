// The examples of examples/, as somebody runs them: the page in plain HTML and the application in React from a site of
// their own, and the shop as a process, in a real Chromium beside a real server.
import assert from 'node:assert/strict';
import { execFile, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtemp, readFile, rm } from 'node:fs/promises';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

import { asPackage } from '../build.js';
import { TIMEOUT, eventually, launch, open } from './browser.js';
import { Server, freePort, program } from './server.js';

const KEY = 'a key for tests alone';
const WEB = fileURLToPath(new URL('..', import.meta.url));
const EXAMPLES = fileURLToPath(new URL('../../examples/', import.meta.url));
const WHERE = 'http://localhost:8080'; // the server of the examples

let folder;
let binary;
let server;
let site; // serves the examples in HTML and React
let shop; // the process of the example in Go
let shopURL;
let browser;

before(
  async () => {
    folder = await mkdtemp(join(tmpdir(), 'headcount-examples-'));
    binary = await program();
    site = createServer(serve);
    await new Promise((ready) => site.listen(0, ready));
    const shopPort = await freePort();
    shopURL = `http://127.0.0.1:${shopPort}`;
    const origins = [siteURL(), shopURL].join(',');
    server = await Server.start(binary.path, ['--allow-origins', origins, '--api-key', KEY, '--shutdown-timeout', '2s']);
    await Promise.all([bundle(), startShop(shopPort)]);
    browser = await launch();
  },
  { timeout: 600_000 },
);

after(async () => {
  await browser?.close();
  site?.close();
  shop?.kill();
  try {
    await server?.stop();
  } finally {
    await binary?.remove();
    if (folder) await rm(folder, { recursive: true });
  }
}, { timeout: TIMEOUT });

const siteURL = () => `http://localhost:${site.address().port}`;

/** The text of an example, for the server of this test. */
const example = async (name) => (await readFile(join(EXAMPLES, name), 'utf8')).replaceAll(WHERE, server.url);

async function serve({ url }, response) {
  const types = { '/bundle.js': 'text/javascript' };
  const files = { '/html': 'html/index.html', '/react': 'react/index.html' };
  const text = url === '/bundle.js' ? await readFile(join(folder, 'bundle.js')) : files[url] && (await example(files[url]));
  if (!text) return response.writeHead(404).end();
  response.writeHead(200, { 'Content-Type': types[url] ?? 'text/html; charset=utf-8' }).end(text);
}

/** Bundles the application as its package.json does. */
async function bundle() {
  const { build } = await import('esbuild');
  await build({
    stdin: { contents: await example('react/main.jsx'), loader: 'jsx', resolveDir: WEB },
    plugins: [asPackage],
    outfile: join(folder, 'bundle.js'), bundle: true, format: 'esm', jsx: 'automatic', logLevel: 'error',
    alias: { 'headcount-web/react': join(WEB, 'react.js'), 'headcount-web': join(WEB, 'headcount.js') },
    define: { 'process.env.NODE_ENV': '"production"' },
  });
}

async function startShop(port) {
  const path = join(folder, 'shop');
  await promisify(execFile)('go', ['build', '-o', path, './examples/go'], { cwd: join(WEB, '..') });
  const env = { ...process.env, HEADCOUNT_URL: server.url, HEADCOUNT_API_KEY: KEY, LISTEN: `127.0.0.1:${port}` };
  shop = spawn(path, { env, stdio: 'inherit' });
  const ended = once(shop, 'close').then(([status]) => assert.fail(`the shop ended with status ${status}`));
  ended.catch(() => {}); // after the tests it ends by a signal
  await Promise.race([ended, eventually(200, 'the shop is open', async () => (await fetch(shopURL).catch(() => ({}))).status)]);
}

const visit = async (address) => open(await browser.newContext(), address);

/** What an element shows, also in its shadow. */
const text = (page, selector) => () =>
  page.evaluate((selector) => {
    const element = document.querySelector(selector);
    return element?.shadowRoot?.textContent.trim() ?? element?.textContent.trim();
  }, selector);

test('the examples: a page, an application in React and a shop in Go', async () => {
  const html = await visit(`${siteURL()}/html`);
  await eventually('1 person is reading this', 'the page counts its visitor', text(html, 'live-count'));
  await eventually('1', 'the page counts that it was opened', text(html, 'live-counter'));

  const react = await visit(`${siteURL()}/react`);
  await eventually('2 people are reading this', 'the application counts its visitor', text(react, '#readers'));
  await eventually('2 people are reading this', 'the page shows another visitor', text(html, 'live-count'));
  await react.click('#like');
  await eventually('1 likes', 'the application likes', text(react, '#like'));
  await eventually(1, 'the page shows the like', () => html.evaluate(() => document.querySelector('like-button').count));

  const watcher = await visit(shopURL);
  await eventually('3', 'the shop has lamps', text(watcher, 'live-counter'));
  const buyer = await visit(shopURL);
  const order = await buyer.inputValue('[name=order]');
  await buyer.click('button');
  await eventually('The lamp is yours. 2 are left.', 'a lamp is sold', text(buyer, 'body'));
  await eventually('2', 'others see it', text(watcher, 'live-counter'));

  const buy = async (order) => {
    const answer = await fetch(`${shopURL}/orders`, { method: 'POST', body: new URLSearchParams({ order }) });
    return [answer.status, (await answer.text()).trim()];
  };
  assert.deepEqual(await buy(order), [200, 'The lamp is yours. 2 are left.'], 'the same order again');
  const sold = (await Promise.all(['a', 'b', 'c', 'd'].map(buy))).map(([status]) => status).sort();
  assert.deepEqual(sold, [200, 200, 409, 409], 'four want the last two lamps');
  await eventually('0', 'others see that none is left', text(watcher, 'live-counter'));

  for (const page of [html, react, watcher]) {
    assert.deepEqual(page.complaints, []);
    await page.context().close();
  }
  await buyer.context().close(); // the answer to an order is plain text, for which a browser wants an icon
});

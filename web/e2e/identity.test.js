// One visitor is one visitor, in a real Chromium: at the first visit, without cookies, in frames, over reloads and
// restarts, and when the user changes.
import assert from 'node:assert/strict';
import { createHmac } from 'node:crypto';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, afterEach, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import { GRACE, LEAVE_GRACE, eventually, expectCount, launch, open, record, recorded, startSite } from './browser.js';
import { Server, program } from './server.js';

/** How many browsers visit for the first time, and so many at a time. */
const BROWSERS = Number(process.env.HEADCOUNT_BROWSERS ?? 8);
const AT_A_TIME = 4;

const RULES = {
  rules: [
    { match: 'likes:*', kind: 'members', public: ['read', 'member'] },
    { match: 'visitors:*', kind: 'unique', public: ['read', 'member'] },
  ],
};
const SECRET = 'a secret of thirty-two bytes, or more';

let binary;
let folder; // of files for the servers
let server;
let guarded; // it demands tokens
let browser;
let site; // of another origin

/** A page that changes counters while it is loaded. */
const eager = (url) => `<!doctype html><html lang="en"><title>Shop</title>
  <live-count id="count" page="/first"></live-count>
  <script type="module">
    import { Headcount } from '${url.searchParams.get('from') ?? ''}/-/headcount.js';
    const { shared } = Headcount;
    const name = '${url.searchParams.get('name')}';
    const add = (key) => shared.counter(key).add().catch((error) => (error.name === 'TimeoutError' ? add(key) : Promise.reject(error))); // on a busy machine
    const calls = ['visitors', 'likes'].flatMap((kind) => [add(kind + ':' + name), add(kind + ':' + name)]);
    window.changed = Promise.all(calls).then(() => true, String);
  </script>`;

const framing = (url) => `<!doctype html><html lang="en"><title>Around</title><iframe src="${url.searchParams.get('from')}/framed"></iframe>`;

const embed = (url) => `<!doctype html><html lang="en"><title>Shop</title>
  <script type="module" src="${url.searchParams.get('from') ?? ''}/-/headcount.js"></script>
  <live-count id="count" page="${url.pathname}"></live-count>`;

/** Has a window find pages of a site on the server's own origin, too. */
const own = (html) => (page) =>
  page.route((url) => url.origin === server.url && !url.pathname.startsWith('/-/') && !url.pathname.startsWith('/api/') && !url.pathname.endsWith('/counter'), (route) =>
    route.fulfill({ contentType: 'text/html', body: html(new URL(route.request().url())) }),
  );

before(
  async () => {
    binary = await program();
    site = await startSite((url) => (url.pathname === '/eager' ? eager : url.pathname === '/framing' ? framing : embed)(url));
    folder = await mkdtemp(join(tmpdir(), 'headcount-identity-'));
    const rules = join(folder, 'rules.json');
    await writeFile(rules, JSON.stringify(RULES));
    server = await Server.start(binary.path, ['--counters', rules, '--allow-origins', site.url, ...GRACE, '--shutdown-timeout', '2s']);
    guarded = await Server.start(binary.path, ['--counters', rules, '--allow-origins', site.url, '--api-key', 'a key that is long enough', '--jwt-secret', SECRET, ...GRACE, '--shutdown-timeout', '2s']);
    browser = await launch();
  },
  { timeout: 600_000 },
);

afterEach(() => Promise.all(browser.contexts().map((context) => context.close()))); // those of a test that failed

after(async () => {
  await browser?.close();
  site?.close();
  try {
    await server?.stop();
    await guarded?.stop();
  } finally {
    await binary?.remove();
    if (folder) await rm(folder, { recursive: true });
  }
});

/** The value of a counter that lasts. */
const value = async (key) => (await (await fetch(`${server.url}/api/v1/counters/${encodeURIComponent(key)}`)).json()).value;

for (const [where, address, prepare] of [
  ['on another origin', () => `${site.url}/eager?name=other&from=${encodeURIComponent(server.url)}`, undefined],
  ['on its own origin', () => `${server.url}/eager?name=own`, own(eager)],
])
  test(`the first visit of each browser is one visitor, ${where}`, async () => {
    const name = new URL(address()).searchParams.get('name');
    const visit = async (context) => {
      const page = await open(context, address(), prepare);
      assert.equal(await page.evaluate(() => window.changed), true);
      await page.waitForFunction(() => document.getElementById('count').count > 0);
      await page.close();
    };
    for (let begun = 0; begun < BROWSERS; begun += AT_A_TIME)
      await Promise.all(
        Array.from({ length: Math.min(AT_A_TIME, BROWSERS - begun) }, async () => {
          const context = await browser.newContext();
          await Promise.all([visit(context), visit(context)]); // two tabs at once
          await visit(context);
          await context.close();
        }),
      );
    assert.equal(await value(`likes:${name}`), BROWSERS, 'likes');
    const visitors = await value(`visitors:${name}`);
    assert.ok(Math.abs(visitors - BROWSERS) <= BROWSERS / 50, `${visitors} visitors of ${BROWSERS}`); // it is an estimate
  });

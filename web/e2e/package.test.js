// The npm package in projects as people have them: installed into empty ones, checked
// by a strict TypeScript, bundled by Vite, esbuild and webpack, rendered by React on a
// server, and run in a real Chromium, with and without WebSockets.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { createReadStream } from 'node:fs';
import { mkdir, mkdtemp, readFile, rm, stat, symlink, writeFile } from 'node:fs/promises';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { extname, join, normalize } from 'node:path';
import { after, before, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

import { TIMEOUT, eventually, launch, open as openIn, startOfficeProxy } from './browser.js';
import { Server, program } from './server.js';

const run = promisify(execFile);
const WEB = fileURLToPath(new URL('..', import.meta.url));
const BUNDLERS = ['vite', 'esbuild', 'webpack'];

let folder; // of the projects
let binary;
let server;
let browser;
let office; // a proxy without WebSockets
let site; // serves the projects' bundles

// What a project has of its own. It counts on a page of its bundler's name.
const MAIN = `
import { Headcount, type Counter } from 'headcount-web';
import 'headcount-web/live-top';
import { show } from './app.js';

const server = new URL(location.href).searchParams.get('server');
if (server) Headcount.defaults = { server };
const text = document.getElementById('text') as HTMLElement;
const element = document.createElement('live-count');
element.addEventListener('count', ({ detail }) => {
  const counter: Counter = detail;
  text.textContent = counter.count.toFixed();
});
element.id = 'made';
document.body.append(element);
show(document.getElementById('root') as HTMLElement);
`;

const APP = `
import { createElement as h, useState } from 'react';
import { createRoot } from 'react-dom/client';
import type { LiveCountEvents } from 'headcount-web';
import { useCount, useCounter, useFollow, useUnread } from 'headcount-web/react';

export function App() {
  const [page, setPage] = useState<string | undefined>(undefined);
  const { count, stale, state } = useCount(page);
  const site = useCount('*', { watch: true });
  const likes = useCounter(\`likes:\${typeof location === 'undefined' ? '' : location.pathname}\`);
  const unread = useUnread();
  const { followed, follow } = useFollow('news');
  const [other, setOther] = useState('unknown');
  return h(
    'main',
    null,
    h('p', { id: 'count' }, count === undefined ? 'unknown' : \`\${count} \${stale ? 'stale' : 'sure'} \${state}\`),
    h('p', { id: 'site' }, site.count ?? 'unknown'),
    h('p', { id: 'unread' }, unread.count ?? 'unknown'),
    h('button', { id: 'like', onClick: () => (likes.mine ? likes.remove() : likes.add()) }, \`\${likes.value ?? 'unknown'} \${likes.mine}\`),
    h('button', { id: 'follow', onClick: follow }, \`\${followed ?? 'unknown'}\`),
    h('button', { id: 'move', onClick: () => setPage('elsewhere' + location.pathname) }, 'move'),
    h('live-count', { id: 'other', page: 'other', watch: true, other: '# people', min: 0, oncount: ({ detail }: LiveCountEvents['count']) => setOther(\`\${detail.count}\`) }),
    h('p', { id: 'heard' }, other),
  );
}

export const show = (root: HTMLElement) => createRoot(root).render(h(App));
`;

// What only types show. A line under @ts-expect-error must be refused.
const TYPED = `
import type { HeadcountElements } from 'headcount-web';
import { useCounter } from 'headcount-web/react';

export const elements = (
  <>
    <live-count page="p" watch={false} count-hidden={false} singular="# person" other="# people" min={5} storage="none" server="/" oncount={({ detail }) => detail.count.toFixed()} />
    <unread-bell label="News" className="bell" />
    <live-counter counter="views:1" format="full" />
    <like-button counter="likes:1" onrefused={({ detail }) => detail.status} />
    <follow-button page="p" onfollow={({ detail }) => detail.followed} />
    <live-top n={5} ontop={({ detail }) => detail[0]?.users.toFixed()} />
    {/* @ts-expect-error: there is no such storage */}
    <live-count storage="some" />
  </>
);
export const other: HeadcountElements['like-button'] = { counter: 'x', label: 'y', class: 'a', id: 'b', style: 'color: red', ref: () => {}, onrefused: ({ detail }) => detail.status };
export const directives: HeadcountElements['live-count'] = { singular: '# person', watch: false, 'count-hidden': false, 'on:count': () => {}, children: 'none' };
// @ts-expect-error: a key is a string
export const wrong = () => useCounter(7);
`;

// A project without React has no error because of it.
const PLAIN = `
import { Headcount, LiveCount } from 'headcount-web';
import { watchTop } from 'headcount-web/live-top';
export const listed = watchTop((top) => top.map(({ page }) => page), { n: 5 });
document.querySelector('live-count')?.addEventListener('count', ({ detail }) => detail.count.toFixed());
document.querySelector('live-count')?.addEventListener('click', ({ clientX }) => clientX.toFixed());
export const stop = new Headcount({ server: 'https://x.example' }).here((counter) => counter?.count.toFixed());
export const made: HTMLElement = new LiveCount();
`;

const compilerOptions = {
  target: 'es2022',
  module: 'esnext',
  moduleResolution: 'bundler',
  jsx: 'react-jsx',
  strict: true,
  exactOptionalPropertyTypes: true,
  skipLibCheck: false,
  skipDefaultLibCheck: true,
  lib: ['es2023', 'dom', 'dom.iterable'],
  types: [],
};

before(
  async () => {
    folder = await mkdtemp(join(tmpdir(), 'headcount-package-'));
    [binary] = await Promise.all([program(), makeProjects()]);
    site = await serveFiles(folder);
    server = await Server.start(binary.path, ['--allow-origins', site.url, '--shutdown-timeout', '2s']);
    office = await startOfficeProxy(server.port);
    browser = await launch();
  },
  { timeout: 600_000 },
);

after(async () => {
  await browser?.close();
  for (const thing of [site, office]) thing?.close();
  try {
    await server?.stop();
  } finally {
    await binary?.remove();
    if (folder) await rm(folder, { recursive: true });
  }
}, { timeout: TIMEOUT });

/** Packs the package, installs it without any network, and writes the projects beside it. */
async function makeProjects() {
  const write = async (name, text) => {
    await mkdir(join(folder, name, '..'), { recursive: true });
    await writeFile(join(folder, name), typeof text === 'string' ? text : JSON.stringify(text));
  };
  const { stdout } = await run('npm', ['pack', '--silent', '--pack-destination', folder], { cwd: WEB });
  const tarball = join(folder, stdout.trim().split('\n').at(-1));
  await write('package.json', { private: true });
  await write('plain/package.json', { private: true });
  // The only thing in the project: so nothing else is asked for, and no registry.
  const install = (where) =>
    run('npm', ['install', '--offline', '--no-audit', '--no-fund', '--omit=peer', '--loglevel=error', tarball], {
      cwd: join(folder, where),
    });
  await install('.');
  await install('plain');
  for (const name of ['react', 'react-dom', '@types'])
    await symlink(join(WEB, 'node_modules', name), join(folder, 'node_modules', name));
  await write('main.ts', MAIN);
  await write('app.ts', APP);
  await write('typed.tsx', TYPED);
  await write('tsconfig.json', {
    compilerOptions: { ...compilerOptions, outDir: 'made' },
    files: ['main.ts', 'app.ts', 'typed.tsx'],
  });
  await write('plain/plain.ts', PLAIN);
  await write('plain/tsconfig.json', {
    compilerOptions: { ...compilerOptions, moduleResolution: 'nodenext', module: 'nodenext', noEmit: true },
    files: ['plain.ts'],
  });
  for (const name of BUNDLERS)
    await write(
      `${name}/index.html`,
      `<!doctype html><html lang="en"><title>Project</title><p id="text"></p><div id="root"></div><script type="module" src="${name === 'vite' ? '../made/main.js' : 'bundle/main.js'}"></script>`,
    );
}

/** Serves files as a static host does, under the paths of a single-page app, too. */
async function serveFiles(root) {
  const kinds = { '.html': 'text/html; charset=utf-8', '.js': 'text/javascript' };
  const server = createServer(async (request, response) => {
    if (request.url === '/favicon.ico') return response.writeHead(204).end();
    const path = join(root, normalize(decodeURIComponent(new URL(request.url, 'http://x').pathname)));
    const file = (await stat(path).catch(() => undefined))?.isDirectory() ? join(path, 'index.html') : path;
    if (!(await stat(file).catch(() => undefined))) return response.writeHead(404).end();
    response.writeHead(200, { 'Content-Type': kinds[extname(file)] ?? 'application/octet-stream' });
    createReadStream(file).pipe(response);
  });
  await new Promise((ready) => server.listen(0, ready));
  return { url: `http://localhost:${server.address().port}`, close: () => server.close() };
}

/** Bundles all three, from what TypeScript has made. */
const bundle = {
  async vite() {
    const { build } = await import('vite');
    await build({
      root: join(folder, 'vite'),
      base: './',
      logLevel: 'error',
      configFile: false,
      build: { outDir: 'bundle', emptyOutDir: true },
    });
    return 'vite/bundle/';
  },
  async esbuild() {
    const { build } = await import('esbuild');
    await build({
      entryPoints: [join(folder, 'made/main.js')],
      outdir: join(folder, 'esbuild/bundle'),
      bundle: true,
      splitting: true,
      format: 'esm',
      minify: true,
      define: { 'process.env.NODE_ENV': '"production"' },
      logLevel: 'error',
    });
    return 'esbuild/';
  },
  async webpack() {
    const { default: webpack } = await import('webpack');
    const stats = await promisify(webpack)({
      mode: 'production',
      entry: join(folder, 'made/main.js'),
      performance: false,
      optimization: { minimize: false }, // which takes longest
      output: { path: join(folder, 'webpack/bundle'), filename: 'main.js' },
    });
    assert.deepEqual(stats.toJson({ all: false, errors: true, warnings: true }), { errors: [], warnings: [] });
    return 'webpack/';
  },
};

test('a strict TypeScript has nothing to say, with and without React', async () => {
  const tsc = (where) =>
    run(process.execPath, [join(WEB, 'node_modules/typescript/bin/tsc'), '-p', join(folder, where)]).catch(
      ({ stdout }) => assert.fail(stdout),
    );
  await Promise.all([tsc('.'), tsc('plain')]);
});

test('a server imports and renders it, and nothing is connected or kept running', async () => {
  const script = `
    import { renderToString } from 'react-dom/server';
    import { createElement } from 'react';
    import { Headcount, LiveCount } from 'headcount-web';
    import { App } from './made/app.js';
    new Headcount({ server: 'https://x.example' }).join('p');
    console.log(renderToString(createElement(App)), typeof LiveCount);`;
  const { stdout } = await run(process.execPath, ['--input-type=module', '-e', script], { cwd: folder });
  assert.match(
    stdout,
    /<p id="count">unknown<\/p><p id="site">unknown<\/p>.*<live-count id="other" page="other".*function/,
  );
});

test('projects with vite, esbuild and webpack count, with and without WebSockets', async () => {
  for (const name of BUNDLERS) {
    const path = await bundle[name]();
    const open = async (through) =>
      openIn(await browser.newContext(), `${site.url}/${path}?server=${encodeURIComponent(through)}`);
    const pages = await Promise.all([open(server.url), open(office.url)]);
    const text = (page, id) => page.textContent(`#${id}`);
    const expect = (page, id, want) => eventually(want, `${name}: ${id} shows`, () => text(page, id));
    for (const page of pages) {
      await expect(page, 'text', '2'); // by the element
      await expect(page, 'count', '2 sure open'); // by the hook, which is the same visitor
      await eventually(
        true,
        `${name}: it shows the site`,
        async () => (await text(page, 'site')) === `${await server.count('*')}`,
      );
      await expect(page, 'unread', '0');
      await expect(page, 'heard', '0'); // by the element's event
      await expect(page, 'like', '0 false');
    }
    assert.equal(await server.count(`/${path}`), 2, name);
    await pages[0].click('#like');
    await expect(pages[0], 'like', '1 true');
    await expect(pages[1], 'like', '1 false');
    await pages[1].click('#like');
    for (const page of pages) await expect(page, 'like', '2 true');
    await expect(pages[0], 'follow', 'false');
    await pages[0].click('#follow');
    await expect(pages[0], 'follow', 'true');
    // The hook leaves its page for another; the element stays, and goes along with the address.
    await pages[0].click('#move');
    await expect(pages[0], 'count', '1 sure open');
    await pages[0].evaluate(() => history.pushState(null, '', './moved'));
    await eventually(1, `${name}: it is on the next page`, () => server.count(`/${path}moved`));
    await eventually(1, `${name}: and left the one before`, () => server.count(`/${path}`));
    assert.deepEqual(pages[0].complaints, [], name);
    await Promise.all(pages.map((page) => page.context().close()));
  }

  const lost = await openIn(await browser.newContext(), `${site.url}/esbuild/`); // it names no server
  await eventually(true, 'it says so', async () =>
    lost.complaints.some((text) => /write <live-count server=/.test(text)),
  );
  await lost.context().close();
});

// The elements in the libraries that people build sites with: each page is built by the library's own compiler, with
// what people write in it, and run in a real Chromium.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { mkdir, mkdtemp, readFile, rm, symlink, writeFile } from 'node:fs/promises';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { after, before, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

import { TIMEOUT, eventually, forAll, launch, open } from './browser.js';
import { Server, program } from './server.js';

const run = promisify(execFile);
const WEB = fileURLToPath(new URL('..', import.meta.url));

// Each application shows the same. Two people hold the page "<library>-quiet", which it watches with a flag that is
// bound to true; it counts its visitor on the page "<library>", with a flag that is bound to false and both forms of
// the sentence. It adds one to no counter: the flag is false. A click on `move` binds another page. What `said` has
// came with an event.
const JSX = (listener) => `(
  <>
    <live-count id="counted" page={page} watch={off} singular="# person" other="# people" ${listener} />
    <live-count id="quiet" page="NAME-quiet" watch={on} />
    <live-counter id="votes" counter={votes} increment={off} />
    <like-button counter={likes} label="Like it">like</like-button>
    <button id="move" onClick={() => setPage('NAME-next')}>move</button>
    <p id="said">{said}</p>
  </>)`;

const HTML = (bind, on) => `
  <live-count id="counted" ${bind('page', 'page')} ${bind('watch', 'off')} singular="# person" other="# people" ${on('count', 'heard')}></live-count>
  <live-count id="quiet" page="NAME-quiet" ${bind('watch', 'on')}></live-count>
  <live-counter id="votes" ${bind('counter', 'votes')} ${bind('increment', 'off')}></live-counter>
  <like-button ${bind('counter', 'likes')} label="Like it">like</like-button>
  <button id="move" ${on('click', 'move')}>move</button>`;

const STATE = `const [on, off, votes, likes] = [true, false, 'votes:NAME', 'likes:NAME'];`;

const react = (root) => `
  import { createElement, Fragment, useEffect, useState } from 'react';
  ${STATE}
  function App() {
    const [page, setPage] = useState('NAME');
    const [said, setSaid] = useState('nothing');
    useEffect(() => {
      const element = document.getElementById('counted');
      const heard = ({ detail }) => setSaid(detail.count);
      element.addEventListener('count', heard);
      return () => element.removeEventListener('count', heard);
    }, []);
    return ${JSX('')};
  }
  ${root}`;

/** The name of a library: the source of its application, and what builds it. */
const LIBRARIES = {
  react: {
    source: react(
      `import { createRoot } from 'react-dom/client'; createRoot(document.getElementById('app')).render(<App />);`,
    ),
  },
  'react-18': {
    source: react(
      `import { createRoot } from 'react-dom/client'; createRoot(document.getElementById('app')).render(<App />);`,
    ),
    alias: { react: 'react-18', 'react-dom': 'react-dom-18' },
  },
  preact: {
    source: `
      import { createElement, Fragment, render } from 'preact';
      import { useState } from 'preact/hooks';
      ${STATE}
      function App() {
        const [page, setPage] = useState('NAME');
        const [said, setSaid] = useState('nothing');
        return ${JSX('oncount={({ detail }) => setSaid(detail.count)}')};
      }
      render(<App />, document.getElementById('app'));`,
  },
  solid: {
    source: `
      import { createSignal } from 'solid-js';
      import { render } from 'solid-js/web';
      ${STATE}
      function App() {
        const [page, setPage] = createSignal('NAME');
        const [said, setSaid] = createSignal('nothing');
        return ${JSX('on:count={({ detail }) => setSaid(detail.count)}').replace('page={page}', 'page={page()}').replace('{said}', '{said()}')};
      }
      render(() => <App />, document.getElementById('app'));`,
    async compile(source) {
      const { transformAsync } = await import('@babel/core');
      return (
        await transformAsync(source, { presets: ['babel-preset-solid'], cwd: WEB, configFile: false, babelrc: false })
      ).code;
    },
  },
  vue: {
    source: `
      import { createApp, ref } from 'vue';
      ${STATE}
      const [page, said] = [ref('NAME'), ref('nothing')];
      const app = createApp({
        template: ${JSON.stringify(
          HTML(
            (name, value) => `:${name}="${value}"`,
            (event, call) => `@${event}="${call}"`,
          ) + '<p id="said">{{ said }}</p>',
        )},
        setup: () => ({ on, off, votes, likes, page, said, heard: ({ detail }) => (said.value = detail.count), move: () => (page.value = 'NAME-next') }),
      });
      app.config.compilerOptions.isCustomElement = (tag) => tag.includes('-');
      app.mount('#app');`,
    alias: { vue: 'vue/dist/vue.esm-bundler.js' },
  },
  svelte: {
    source: `
      <script>
        ${STATE}
        let page = $state('NAME');
        let said = $state('nothing');
        const heard = ({ detail }) => (said = detail.count);
        const move = () => (page = 'NAME-next');
      </script>
      ${HTML(
        (name, value) => `${name}={${value}}`,
        (event, call) => `on${event}={${call}}`,
      )}
      <p id="said">{said}</p>`,
    async compile(source) {
      const { compile } = await import('svelte/compiler');
      const { js } = compile(source, { generate: 'client', filename: 'App.svelte' });
      return (
        js.code.replace('export default function', 'function') +
        `\nimport { mount } from 'svelte';\nmount(App, { target: document.getElementById('app') });`
      );
    },
  },
  lit: {
    source: `
      import { html, render } from 'lit';
      ${STATE}
      let [page, said] = ['NAME', 'nothing'];
      const heard = ({ detail }) => { said = detail.count; draw(); };
      const move = () => { page = 'NAME-next'; draw(); };
      const draw = () => render(html\`${HTML(
        (name, value) => `.${name}=\${${value}}`,
        (event, call) => `@${event}=\${${call}}`,
      )}<p id="said">\${said}</p>\`, document.getElementById('app'));
      draw();`,
  },
  angular: {
    source: `
      import { CUSTOM_ELEMENTS_SCHEMA, Component, provideZonelessChangeDetection, signal } from '@angular/core';
      import { bootstrapApplication } from '@angular/platform-browser';
      import type { Counter } from 'headcount-web';
      ${STATE}
      @Component({
        selector: '#app',
        schemas: [CUSTOM_ELEMENTS_SCHEMA],
        template: ${JSON.stringify(
          HTML(
            (name, value) => `[${name}]="${value === 'page' ? 'page()' : value}"`,
            (event, call) => `(${event})="${call}(${call === 'heard' ? '$event' : ''})"`,
          ) + '<p id="said">{{ said() }}</p>',
        )},
      })
      class App {
        on = on; off = off; votes = votes; likes = likes;
        page = signal('NAME');
        said = signal<string | number>('nothing');
        heard(event: CustomEvent<Counter>) { this.said.set(event.detail.count); }
        move() { this.page.set('NAME-next'); }
      }
      bootstrapApplication(App, { providers: [provideZonelessChangeDetection()] });`,
    compile: ahead,
    plugins: [{ name: 'linker', setup: (build) => build.onLoad({ filter: /@angular\/.*js$/ }, link) }],
  },
  // What no library does, but pages do: properties of elements that are there before the script is.
  late: {
    source: `
      ${STATE}
      document.getElementById('app').innerHTML = ${JSON.stringify(
        HTML(
          () => '',
          () => '',
        ) + '<p id="said">nothing</p>',
      )};
      const [counted, quiet, counter] = ['counted', 'quiet', 'votes'].map((id) => document.getElementById(id));
      Object.assign(counted, { page: 'NAME', watch: off, other: '# people' });
      Object.assign(quiet, { watch: on });
      Object.assign(counter, { counter: votes, increment: off });
      Object.assign(document.querySelector('like-button'), { counter: likes });
      counted.addEventListener('count', ({ detail }) => (document.getElementById('said').textContent = detail.count));
      document.getElementById('move').addEventListener('click', () => (counted.page = 'NAME-next'));`,
    after: true,
  },
};

let folder;
let binary;
let server;
let site;
let browser;

before(
  async () => {
    folder = await mkdtemp(join(tmpdir(), 'headcount-frameworks-'));
    await symlink(join(WEB, 'node_modules'), join(folder, 'node_modules'));
    [binary] = await Promise.all([program(), ...Object.keys(LIBRARIES).map(build)]);
    site = await serveApplications();
    const longHolds = ['--presence-timeout', '1m']; // a busy machine takes its time
    server = await Server.start(binary.path, ['--allow-origins', site.url, '--shutdown-timeout', '2s', ...longHolds]);
    browser = await launch();
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
    if (folder) await rm(folder, { recursive: true });
  }
}, { timeout: TIMEOUT });

/** Has Angular's compiler build an application ahead of time, as its command line does. */
async function ahead(source, folder) {
  const compilerOptions = {
    target: 'es2022',
    module: 'es2022',
    moduleResolution: 'bundler',
    lib: ['es2022', 'dom'],
    types: [],
    strict: true,
    skipLibCheck: true,
    experimentalDecorators: true,
    outDir: 'made',
    paths: { 'headcount-web': [join(WEB, 'headcount.d.ts')] },
  };
  const options = { compilerOptions, angularCompilerOptions: { strictTemplates: true }, files: ['app.ts'] };
  await writeFile(join(folder, 'app.ts'), source);
  await writeFile(join(folder, 'tsconfig.json'), JSON.stringify(options));
  const ngc = join(WEB, 'node_modules/@angular/compiler-cli/bundles/src/bin/ngc.js');
  await run(process.execPath, [ngc, '-p', folder]).catch(({ stdout, stderr }) => assert.fail(stdout + stderr));
  return readFile(join(folder, 'made/app.js'), 'utf8');
}

/** Angular's packages are compiled in part. The linker does the rest, so that the page needs no compiler. */
async function link({ path }) {
  const { transformAsync } = await import('@babel/core');
  const { createEs2015LinkerPlugin } = await import('@angular/compiler-cli/linker/babel');
  const plugins = [
    createEs2015LinkerPlugin({
      linkerJitMode: false,
      fileSystem: { resolve: (one) => one, exists: () => false, dirname },
      logger: { level: 1, debug() {}, info() {}, warn() {}, error: console.error },
    }),
  ];
  const { code } = await transformAsync(await readFile(path, 'utf8'), {
    filename: path,
    plugins,
    compact: false,
    configFile: false,
    babelrc: false,
  });
  return { contents: code };
}

/** Builds the application of a library with its own compiler, and bundles it. */
async function build(name) {
  const { source, compile = (text) => text, alias = {}, plugins = [] } = LIBRARIES[name];
  await mkdir(join(folder, name));
  const entry = join(folder, name, 'main.jsx');
  await writeFile(entry, await compile(source.replaceAll('NAME', name), join(folder, name)));
  const { build } = await import('esbuild');
  await build({
    entryPoints: [entry],
    outfile: join(folder, name, 'bundle.js'),
    bundle: true,
    format: 'esm',
    alias,
    plugins,
    logLevel: 'error',
    keepNames: true,
    conditions: ['browser', 'production'],
    jsx: 'transform',
    jsxFactory: 'createElement',
    jsxFragment: 'Fragment',
    define: {
      'process.env.NODE_ENV': '"production"',
      __VUE_OPTIONS_API__: 'true',
      __VUE_PROD_DEVTOOLS__: 'false',
      __VUE_PROD_HYDRATION_MISMATCH_DETAILS__: 'false',
    },
  });
}

/**
 * Serves the applications, each under the name of its library. The client is loaded before it, or, with ?after, after
 * it.
 */
async function serveApplications() {
  const listener = createServer(async ({ url }, response) => {
    const { pathname, searchParams } = new URL(url, 'http://x');
    const [, name, file] = pathname.split('/');
    if (!LIBRARIES[name]) return response.writeHead(404).end();
    if (file === 'bundle.js')
      return response
        .writeHead(200, { 'Content-Type': 'text/javascript' })
        .end(await readFile(join(folder, name, file)));
    const scripts = [`${server.url}/-/headcount.js`, `/${name}/bundle.js`].map(
      (address) => `<script type="module" src="${address}"></script>`,
    );
    if (searchParams.has('after')) scripts.reverse();
    response.writeHead(200, { 'Content-Type': 'text/html; charset=utf-8' });
    response.end(
      `<!doctype html><html lang="en"><title>${name}</title><link rel="icon" href="data:,"><body><div id="app"></div>${scripts.join('')}`,
    );
  });
  await new Promise((ready) => listener.listen(0, ready));
  return { url: `http://localhost:${listener.address().port}`, close: () => listener.close() };
}

/** What an application shows and does, in a tab of its own. The errors name the library. */
async function expectAll(name) {
  const leave = await Promise.all([server.hold(`${name}-quiet`), server.hold(`${name}-quiet`)]);
  for (const order of LIBRARIES[name].after ? ['?after'] : ['', '?after']) {
    const page = await open(await browser.newContext(), `${site.url}/${name}/${order}`);
    const complainsNot = () => assert.deepEqual(page.complaints, [], `${name}${order} complains`);
    const text = async (selector) => {
      complainsNot(); // what is not built right need not be waited for
      return page.evaluate(
        (selector) =>
          document.querySelector(selector)?.shadowRoot?.textContent ?? document.querySelector(selector)?.textContent,
        selector,
      );
    };
    await eventually('1 person', `${name}${order} shows a sentence`, () => text('#counted'));
    await eventually('1', `${name}${order} has heard of the count`, () => text('#said'));
    await eventually('2', `${name}${order} watches`, () => text('#quiet'));
    await eventually('0', `${name}${order} shows a counter, and adds nothing`, () => text('#votes'));
    await eventually('false', `${name}${order} has a button`, () =>
      page.evaluate(() =>
        document.querySelector('like-button')?.shadowRoot?.querySelector('button').getAttribute('aria-pressed'),
      ),
    );
    await page.click('#move');
    await eventually(1, `${name}${order} has moved`, () => server.count(`${name}-next`));
    await eventually(0, `${name}${order} has left`, () => server.count(name));
    assert.equal(await server.count(`${name}-quiet`), 2, `${name}${order} is counted where it only watches`);
    complainsNot();
    await page.context().close();
    await eventually(0, `${name}${order} is gone`, () => server.count(`${name}-next`));
  }
  await Promise.all(leave.map((end) => end()));
}

// They have pages of their own, so all wait at once.
test('the elements in all libraries', () => forAll(Object.keys(LIBRARIES), expectAll));

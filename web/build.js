// Builds the client: in public/ the files that the server serves, and in package/
// those of the npm package. The served ones are in the repository so that `go install`
// needs no Node. test/build.test.js proves that they match the sources.
//
//   npm run build
//   npm pack        builds the package first
import { createHash } from 'node:crypto';
import { copyFile, mkdir, readFile, rm, writeFile } from 'node:fs/promises';
import { basename } from 'node:path';

/** The parts that other files load. Each comes after those that it loads itself. */
const PARTS = ['live.js', 'list.js', 'bell.js', 'more.js'];
/** What headcount.js is made of. */
export const SOURCES = ['client.js', 'elements.js', 'hub.js', 'identity.js', 'link.js', 'share.js'];
export const SCRIPTS = ['headcount.js', 'live.js', 'bell.js', 'list.js', 'more.js', 'rescue.js', 'live-top.js'];
const TYPES = ['headcount.d.ts', 'react.d.ts', 'live-top.d.ts'];

const source = (name) => readFile(new URL(name, import.meta.url), 'utf8');

/** Returns headcount.js with its sources in it. The other files are loaded when they are needed. */
async function whole() {
  const { build } = await import('esbuild');
  const entry = new URL('headcount.js', import.meta.url).pathname;
  const external = SCRIPTS.map((name) => `./${name}`);
  const { outputFiles } = await build({
    entryPoints: [entry],
    bundle: true,
    external,
    write: false,
    format: 'esm',
    target: 'esnext',
  });
  return outputFiles[0].text;
}

/**
 * Returns a script whose imports of parts name their content: browsers keep such a file for good.
 * rescue.js has a new name at each attempt.
 */
async function naming(name) {
  let text = name === 'headcount.js' ? await whole() : await source(name);
  const loads = PARTS.slice(0, PARTS.includes(name) ? PARTS.indexOf(name) : undefined);
  for (const part of loads) {
    if (!text.includes(`./${part}`)) continue;
    const hash = createHash('sha256').update(await served(part)).digest('hex').slice(0, 8);
    text = text.replace(new RegExp(`(['"\`])\\./${part}`, 'g'), `$1./${part}?${hash}`);
  }
  return text;
}

/** Returns a file of the client as the server serves it; scripts are minified. Names that begin with _ are private to their file, or to what headcount.js is made of. */
export async function served(name) {
  if (!SCRIPTS.includes(name)) return source(name);
  const { minify } = await import('terser');
  // To a script that works both words mean the same, and one alone is compressed better than two.
  const text = (await naming(name)).replace(/\bconst\b/g, 'let');
  const { code } = await minify(text, {
    module: true,
    ecma: 2022,
    compress: {
      passes: 4,
      unsafe: true,
      unsafe_arrows: true,
      hoist_funs: true,
      pure_getters: true,
      keep_fargs: false,
    },
    mangle: { properties: { regex: /^_/ } },
  });
  return code + '\n';
}

/**
 * Returns a file as it is in the npm package. A bundler cannot follow an import whose
 * name is put together, and a bundle does not come from the server. Its default is no
 * address, so the error about that says what to do.
 */
export async function packed(name) {
  const text = await source(name);
  const literal = [/ *const file = `\.\/(\w+)\.js.*\n([^]*?)import\(file\)/, "$2import('./$1.js')"];
  const elements = PARTS.filter((part) => part !== 'list.js').map((part) => `'./${part}': () => import('./${part}')`);
  const parts = ['import(name)', `/** @type {any} */ ({ ${elements.join(', ')} })[file]()`];
  const nowhere = [
    /new URL\('\.\.', import\.meta\.url\); \/\/.*/,
    `'none: write <live-count server="https://counter.example.com">, or set Headcount.defaults = { server }';`,
  ];
  const changes = { 'bell.js': [literal], 'client.js': [parts, nowhere], 'hub.js': [literal] }[name] ?? [];
  return changes.reduce((made, [from, to]) => {
    const changed = made.replace(from, to);
    if (changed === made) throw new Error(`${name} has no ${from} any more`);
    return changed;
  }, text);
}

/** Has esbuild bundle the sources as they are in the package. */
export const asPackage = {
  name: 'as-package',
  setup: (on) =>
    on.onLoad({ filter: /web\/[\w-]+\.js$/ }, async ({ path }) => ({ contents: await packed(basename(path)) })),
};

async function write(folder, names, make) {
  const to = new URL(`${folder}/`, import.meta.url);
  await mkdir(to, { recursive: true });
  for (const name of names) await writeFile(new URL(name, to), await make(name));
}

if (process.argv[1] === new URL(import.meta.url).pathname) {
  if (process.argv[2] === 'package') {
    await rm(new URL('package/', import.meta.url), { recursive: true, force: true });
    await write('package', [...SCRIPTS, ...SOURCES, 'react.js', ...TYPES], packed);
    await copyFile(new URL('../LICENSE', import.meta.url), new URL('LICENSE', import.meta.url)); // npm takes it from here
  } else await write('public', [...SCRIPTS, 'headcount.d.ts', 'live-top.d.ts'], served);
}

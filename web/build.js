// Builds the client's files in public/ that the server serves. They are in the
// repository so that `go install` needs no Node. test/build.test.js proves that
// they match the sources.
//
//   npm run build
import { readFile, writeFile } from 'node:fs/promises';

import { minify } from 'terser';

export const FILES = ['headcount.js', 'bell.js', 'more.js', 'rescue.js'];

/** Returns a file of the client minified, as the server serves it. Names that begin with _ are private to their file. */
export async function build(name) {
  const source = await readFile(new URL(name, import.meta.url), 'utf8');
  const { code } = await minify(source, {
    module: true,
    ecma: 2022,
    compress: { passes: 3, unsafe: true, unsafe_arrows: true, pure_getters: true, keep_fargs: false, reduce_funcs: false, inline: 1 },
    mangle: { properties: { regex: /^_/ } },
  });
  return code + '\n';
}

if (process.argv[1] === new URL(import.meta.url).pathname)
  for (const name of FILES) await writeFile(new URL(`public/${name}`, import.meta.url), await build(name));

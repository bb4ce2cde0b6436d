//! Which module of a crate imports from which, read from its sources.
//!
//! An import counts for the module that defines the name: a name that a module only re-exports
//! is followed to its definition. So a parent that re-exports its children does not depend on
//! them, unless its own code uses the names. Code under `cfg(test)` does not count.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use crate::tokens::{Token, tokens};

/// The path of a module from the crate's root.
pub(crate) type Name = Vec<String>;

/// The modules of a crate, and the imports of each.
pub(crate) struct Imports {
    edges: BTreeMap<Name, BTreeMap<Name, usize>>,
    paths: BTreeMap<Name, Vec<(Name, usize)>>,
}

impl Imports {
    /// Reads the crate with `root` (`lib.rs` or `main.rs`) and the files below its folder.
    pub(crate) fn read(root: &Path) -> Self {
        let folder = root.parent().unwrap();
        let files = files_below(folder);
        let modules = files.iter().filter(|file| is_of_crate(folder, file, root));
        let texts = modules.map(|file| (name_of(folder, file), fs::read_to_string(file).unwrap()));
        Self::of(&texts.collect())
    }

    pub(crate) fn of(texts: &BTreeMap<Name, String>) -> Self {
        let names: BTreeSet<Name> = texts.keys().cloned().collect();
        let parsed = texts.iter().map(|(name, text)| {
            let mut module = Module::new(name.clone());
            module.read(&tokens(text), &names);
            (name.clone(), module)
        });
        let parsed: BTreeMap<Name, Module> = parsed.collect();
        let edges = parsed.iter().map(|(name, module)| {
            let mut to = BTreeMap::new();
            for (path, line) in &module.used {
                let definer = definer(&parsed, path);
                if definer != *name {
                    to.entry(definer).or_insert(*line);
                }
            }
            (name.clone(), to)
        });
        let edges = edges.collect();
        let paths = parsed.into_iter().map(|(name, module)| (name, module.used));
        Self {
            edges,
            paths: paths.collect(),
        }
    }

    pub(crate) fn modules(&self) -> impl Iterator<Item = &Name> {
        self.edges.keys()
    }

    /// Each path that a module uses, as it is written, from the root of the crate, with its
    /// line.
    pub(crate) fn paths(&self) -> impl Iterator<Item = (&Name, &Name, usize)> {
        let paths = self.paths.iter();
        paths.flat_map(|(name, used)| used.iter().map(move |(path, line)| (name, path, *line)))
    }

    /// Groups of modules that import each other, directly or through others, and the
    /// shortest cycle through the first module of each.
    pub(crate) fn cycles(&self) -> Vec<Vec<String>> {
        let mut left: BTreeSet<&Name> = self.edges.keys().collect();
        let mut cycles = Vec::new();
        while let Some(module) = left.pop_first() {
            if let Some(cycle) = self.shortest_cycle(module) {
                let reached = self.reached(module);
                left.retain(|other| {
                    !(reached.contains(*other) && self.reached(other).contains(module))
                });
                cycles.push(cycle);
            }
        }
        cycles
    }

    fn reached(&self, from: &Name) -> BTreeSet<Name> {
        let mut reached = BTreeSet::new();
        let mut next = vec![from];
        while let Some(module) = next.pop() {
            for to in self.edges.get(module).into_iter().flat_map(BTreeMap::keys) {
                if reached.insert(to.clone()) {
                    next.push(to);
                }
            }
        }
        reached
    }

    fn shortest_cycle(&self, start: &Name) -> Option<Vec<String>> {
        let mut before: BTreeMap<&Name, (&Name, usize)> = BTreeMap::new();
        let mut next = VecDeque::from([start]);
        while let Some(module) = next.pop_front() {
            for (to, line) in self.edges.get(module).into_iter().flatten() {
                if !before.contains_key(to) {
                    before.insert(to, (module, *line));
                    next.push_back(to);
                }
            }
        }
        let mut steps = Vec::new();
        let mut at = start;
        loop {
            let (from, line) = before.get(at)?;
            steps.push(format!("{}:{line} uses {}", from.join("::"), at.join("::")));
            at = from;
            if at == start {
                steps.reverse();
                return Some(steps);
            }
        }
    }
}

/// The module that defines what `path` names.
fn definer(modules: &BTreeMap<Name, Module>, path: &[String]) -> Name {
    let mut path = path.to_vec();
    // No chain of re-exports is this long.
    for _ in 0..8 {
        let at = (0..=path.len())
            .rev()
            .find(|end| modules.contains_key(&path[..*end]))
            .unwrap_or(0);
        let Some(target) = path
            .get(at)
            .and_then(|name| modules[&path[..at]].imported.get(name))
        else {
            return path[..at].to_vec();
        };
        path = [target.as_slice(), &path[at + 1..]].concat();
    }
    path
}

struct Module {
    name: Name,
    /// Each imported name and its path.
    imported: BTreeMap<String, Name>,
    /// Each path that the code uses, and its line.
    used: Vec<(Name, usize)>,
    /// Re-exported names, with the path and the line. They count as used if the code uses them.
    exported: BTreeMap<String, (Name, usize)>,
}

impl Module {
    fn new(name: Name) -> Self {
        Self {
            name,
            imported: BTreeMap::new(),
            used: Vec::new(),
            exported: BTreeMap::new(),
        }
    }

    fn read(&mut self, tokens: &[(Token, usize)], names: &BTreeSet<Name>) {
        for child in names
            .iter()
            .filter(|name| name.len() == self.name.len() + 1 && name.starts_with(&self.name))
        {
            let last = child.last().unwrap().clone();
            self.imported.insert(last, child.clone());
        }
        let mut code = Vec::new();
        let mut inline: Vec<(String, usize)> = Vec::new();
        let (mut depth, mut at) = (0, 0);
        let word = |at: usize| tokens.get(at).and_then(|(token, _)| token.word());
        let is_at = |at: usize, what| {
            tokens
                .get(at)
                .is_some_and(|(token, _)| *token == Token::Other(what))
        };
        while let Some((token, line)) = tokens.get(at) {
            let within: Vec<String> = inline.iter().map(|(name, _)| name.clone()).collect();
            match token {
                Token::Other('{') => depth += 1,
                Token::Other('}') => {
                    depth -= 1;
                    inline.pop_if(|(_, outside)| *outside == depth);
                }
                Token::Word(keyword) if keyword == "use" && !is_at(at + 1, '<') => {
                    let end = position(tokens, at, ';');
                    let is_exported = is_public(&tokens[..at]);
                    for (path, name) in leaves(&tokens[at + 1..end]) {
                        self.import(&within, &path, name, is_exported, *line, names);
                    }
                    at = end;
                }
                Token::Word(keyword) if keyword == "mod" && is_at(at + 2, ';') => at += 1,
                Token::Word(keyword) if keyword == "mod" && is_at(at + 2, '{') => {
                    if is_of_tests(&tokens[..at]) {
                        at = closing(tokens, at + 2);
                    } else {
                        inline.push((word(at + 1).unwrap().to_owned(), depth));
                        depth += 1;
                        at += 2;
                    }
                }
                Token::Word(first) => {
                    let mut path = vec![first.clone()];
                    let is_scope = at > 0 && word(at - 1) == Some("in");
                    while tokens.get(at + 1).is_some_and(|t| t.0 == Token::Separator)
                        && let Some(next) = word(at + 2)
                    {
                        path.push(next.to_owned());
                        at += 2;
                    }
                    if !is_scope {
                        code.push((within, path, *line));
                    }
                }
                Token::Text(text) if text.starts_with("crate::") => {
                    let path = text.split("::").map(str::to_owned).collect();
                    code.push((within, path, *line));
                }
                Token::Other(_) | Token::Separator | Token::Text(_) => {}
            }
            at += 1;
        }
        for (within, path, line) in code {
            if let Some((exported, _)) = self.exported.get(&path[0]) {
                self.used.push((exported.clone(), line));
            }
            if path.len() > 1
                && let Some(path) = self.absolute(&within, &path)
            {
                self.used.push((path, line));
            }
        }
    }

    fn import(
        &mut self,
        within: &[String],
        path: &[String],
        name: String,
        is_exported: bool,
        line: usize,
        modules: &BTreeSet<Name>,
    ) {
        let Some(path) = self.absolute(within, path) else {
            return;
        };
        if name != "*" && within.is_empty() {
            self.imported.insert(name.clone(), path.clone());
        }
        if is_exported && path.starts_with(&self.name) {
            self.exported.insert(name, (path, line));
        } else if name == "*" || !modules.contains(&path) {
            // A module counts as used by each path that begins with its name.
            self.used.push((path, line));
        }
    }

    /// The path from the crate's root; `None` for a path of another crate.
    fn absolute(&self, within: &[String], path: &[String]) -> Option<Name> {
        let mut base = [self.name.as_slice(), within].concat();
        let mut rest = path;
        match rest[0].as_str() {
            "crate" => {
                base.clear();
                rest = &rest[1..];
            }
            "self" => rest = &rest[1..],
            "super" => {
                while rest.first().is_some_and(|word| word == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            first => {
                base.clone_from(self.imported.get(first)?);
                rest = &rest[1..];
            }
        }
        // The contents of an inline module count for its file.
        if base.len() > self.name.len() && base.starts_with(&self.name) && !within.is_empty() {
            base.truncate(self.name.len());
        }
        Some([base.as_slice(), rest].concat())
    }
}

/// Each leaf of a `use` tree: its path, and its name here.
fn leaves(tree: &[(Token, usize)]) -> Vec<(Vec<String>, String)> {
    let mut prefix = Vec::new();
    let mut at = 0;
    while let Some((token, _)) = tree.get(at) {
        match token {
            Token::Word(word) if word == "as" => {
                let name = tree[at + 1].0.word().unwrap().to_owned();
                return vec![(prefix, name)];
            }
            Token::Word(word) => prefix.push(word.clone()),
            Token::Other('*') => return vec![(prefix, "*".to_owned())],
            Token::Other('{') => {
                let mut found = Vec::new();
                for part in parts(&tree[at + 1..closing(tree, at)]) {
                    for (path, name) in leaves(part) {
                        let path = if path == ["self"] { Vec::new() } else { path };
                        let path = [prefix.as_slice(), &path].concat();
                        let name = if name == "self" {
                            path.last().unwrap().clone()
                        } else {
                            name
                        };
                        found.push((path, name));
                    }
                }
                return found;
            }
            _ => {}
        }
        at += 1;
    }
    let name = prefix.last().cloned();
    name.map(|name| (prefix, name)).into_iter().collect()
}

/// The parts of a `use` tree between the commas of one level.
fn parts(tree: &[(Token, usize)]) -> Vec<&[(Token, usize)]> {
    let mut depth = 0;
    tree.split(move |(token, _)| {
        match token {
            Token::Other('{') => depth += 1,
            Token::Other('}') => depth -= 1,
            _ => {}
        }
        depth == 0 && *token == Token::Other(',')
    })
    .collect()
}

fn position(tokens: &[(Token, usize)], from: usize, what: char) -> usize {
    let mut rest = tokens[from..].iter();
    let found = rest.position(|(token, _)| *token == Token::Other(what));
    from + found.unwrap()
}

/// The place of the brace that closes the one at `open`.
fn closing(tokens: &[(Token, usize)], open: usize) -> usize {
    let mut depth = 0;
    let mut rest = tokens[open..].iter();
    let found = rest.position(|(token, _)| {
        match token {
            Token::Other('{') => depth += 1,
            Token::Other('}') => depth -= 1,
            _ => {}
        }
        depth == 0
    });
    open + found.unwrap()
}

/// Whether `pub` or `pub(..)` ends here.
fn is_public(before: &[(Token, usize)]) -> bool {
    let end = match before {
        [.., (Token::Other(')'), _)] => before
            .iter()
            .rposition(|(token, _)| *token == Token::Other('('))
            .unwrap(),
        _ => before.len(),
    };
    end > 0 && before[end - 1].0.word() == Some("pub")
}

/// Whether the text before an item ends with `#[cfg(test)]` and other attributes.
fn is_of_tests(before: &[(Token, usize)]) -> bool {
    let start = before
        .iter()
        .rposition(|(token, _)| matches!(token, Token::Other(';' | '}')));
    let words = before[start.map_or(0, |at| at + 1)..].iter();
    let words: Vec<&str> = words.filter_map(|(token, _)| token.word()).collect();
    words.windows(2).any(|pair| pair == ["cfg", "test"])
}

fn is_of_crate(folder: &Path, file: &Path, root: &Path) -> bool {
    let below = file.strip_prefix(folder).unwrap();
    let is_a_binary = below.starts_with("bin");
    let is_of_tests =
        below.ends_with("tests.rs") || below.components().any(|part| part.as_os_str() == "tests");
    let is_another_root = ["lib.rs", "main.rs"]
        .iter()
        .any(|name| below == Path::new(name))
        && file != root;
    !(is_a_binary || is_of_tests || is_another_root)
}

fn name_of(folder: &Path, file: &Path) -> Name {
    let below = file.strip_prefix(folder).unwrap().with_extension("");
    let names = below.iter().map(|part| part.to_str().unwrap().to_owned());
    names
        .filter(|name| !matches!(name.as_str(), "lib" | "main" | "mod"))
        .collect()
}

/// Every source file in a folder and below.
pub(crate) fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files_below(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

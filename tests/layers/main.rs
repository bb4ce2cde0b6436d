//! Each module of `src/` is in one layer. It may use its own top module and the layers below,
//! and nothing above. Two domains never use each other. No imports form a cycle.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test panics to fail")]

mod imports;
mod tokens;

use std::collections::BTreeSet;
use std::path::Path;

use imports::{Imports, Name};

/// Each top module of `src/` and its layer, lowest first.
const MODULES: &[(&str, Layer)] = &[
    ("crash", Layer::Values),
    ("error", Layer::Values),
    ("id", Layer::Values),
    ("deadline", Layer::Values),
    ("guide", Layer::Values),
    ("kernel", Layer::Kernel),
    ("uevent", Layer::Kernel),
    ("scsi", Layer::Domain),
    ("nbd", Layer::Domain),
    ("iscsi", Layer::Domain),
    ("transport", Layer::Domain),
    ("multipath", Layer::Domain),
    ("engine", Layer::Engine),
    ("reconcile", Layer::Reconcile),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Layer {
    Values,
    Kernel,
    Domain,
    Engine,
    Reconcile,
}

fn layer(module: &str) -> Option<Layer> {
    let found = MODULES.iter().find(|(name, _)| *name == module);
    found.map(|(_, layer)| *layer)
}

/// Why `module` may not use `used`.
fn fault(module: &str, used: &str) -> Option<String> {
    let (Some(at), Some(to)) = (layer(module), layer(used)) else {
        return Some(format!(
            "{module} or {used} is in no layer: add it to MODULES"
        ));
    };
    if to > at {
        return Some(format!("{module} ({at:?}) uses {used} ({to:?}) above it"));
    }
    let are_domains = at == Layer::Domain && to == Layer::Domain && module != used;
    are_domains.then(|| format!("the domain {module} uses the domain {used}"))
}

fn imports(root: &str) -> Imports {
    Imports::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(root))
}

#[test]
fn no_module_uses_a_layer_above_it_or_another_domain() {
    let imports = imports("src/lib.rs");
    let mut faults = Vec::new();
    let mut checked = 0;
    for (module, used, line) in imports.paths() {
        // lib.rs declares the layers.
        let [Some(top), Some(used)] = [module.first(), used.first()] else {
            continue;
        };
        checked += 1;
        faults.extend(fault(top, used).map(|why| format!("{}:{line}: {why}", module.join("::"))));
    }
    assert!(checked > 1000, "only {checked} paths");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_command_line_uses_the_public_interface_alone() {
    let imports = imports("src/bin/lunbd/main.rs");
    assert!(imports.modules().count() > 10);
    let own: BTreeSet<&str> = imports
        .modules()
        .filter_map(|name| name.first())
        .map(String::as_str)
        .collect();
    for (module, used, line) in imports.paths() {
        let is_own = used.first().is_some_and(|top| own.contains(top.as_str()));
        assert!(
            is_own,
            "{}:{line}: crate::{}",
            module.join("::"),
            used.join("::")
        );
    }
}

#[test]
fn no_module_imports_from_one_that_imports_from_it() {
    for (root, at_least) in [
        ("src/lib.rs", 300),
        ("src/bin/lunbd/main.rs", 15),
        ("sys/src/lib.rs", 5),
    ] {
        let imports = imports(root);
        let modules = imports.modules().count();
        assert!(modules >= at_least, "{root}: only {modules} modules");
        let cycles: Vec<String> = imports
            .cycles()
            .iter()
            .map(|cycle| cycle.join("\n"))
            .collect();
        assert!(
            cycles.is_empty(),
            "{root}: {} cycles\n{}",
            cycles.len(),
            cycles.join("\n\n")
        );
    }
}

/// The methods of `Engine` that are no calls from outside its module.
fn inner_methods(text: &str) -> Vec<&str> {
    let blocks = text.split("\nimpl Engine {\n").skip(1);
    let blocks = blocks.filter_map(|after| after.split("\n}\n").next());
    let is_inner = |line: &&str| {
        let item = line.strip_prefix("    ").unwrap_or_default();
        ["fn ", "pub(super) ", "pub(in "]
            .iter()
            .any(|start| item.starts_with(start))
    };
    blocks.flat_map(str::lines).filter(is_inner).collect()
}

/// A method can be called without an import, so it would hide which module uses which.
#[test]
fn each_step_of_a_call_is_a_function_and_no_method_of_engine() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/engine");
    let (mut faults, mut blocks) = (Vec::new(), 0);
    for file in imports::files_below(&folder) {
        let text = std::fs::read_to_string(&file).unwrap();
        blocks += text.matches("\nimpl Engine {\n").count();
        let inner = inner_methods(&text).into_iter();
        faults.extend(inner.map(|line| format!("{}: {}", file.display(), line.trim())));
    }
    assert!(blocks > 15, "only {blocks} blocks");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    let text = "\nimpl Engine {\n    pub fn a() {}\n    fn b() {}\n    pub(super) fn c() {}\n}\n";
    assert_eq!(inner_methods(text).len(), 2);
}

#[test]
fn a_use_of_a_higher_layer_or_of_another_domain_is_found() {
    assert!(fault("kernel", "scsi").is_some());
    assert!(fault("scsi", "nbd").is_some());
    assert!(fault("error", "kernel").is_some());
    assert!(fault("engine", "reconcile").is_some());
    assert_eq!(fault("engine", "scsi"), None);
    assert_eq!(fault("scsi", "scsi"), None);
}

/// The imports of a crate with these modules.
fn of(modules: &[(&str, &str)]) -> Imports {
    let name = |path: &str| -> Name {
        path.split("::")
            .map(str::to_owned)
            .filter(|name| !name.is_empty())
            .collect()
    };
    Imports::of(
        &modules
            .iter()
            .map(|(path, text)| (name(path), (*text).to_owned()))
            .collect(),
    )
}

#[test]
fn a_cycle_is_found_however_its_imports_are_written() {
    for (one, other) in [
        ("use crate::b::B;", "use super::a::A;"),
        (
            "fn a() { crate::b::run(); }",
            "use crate::{\n    a::{self, A},\n    c::C,\n};\nfn b() { a::run(); }",
        ),
        (
            "use super::b;\nfn a() -> b::B { b::run() }",
            "mod inner { use super::super::a::A; }",
        ),
        (
            "#[serde(with = \"crate::b::text\")]\nstruct A;",
            "/* A */ pub use crate::a::A as Other;",
        ),
        ("use crate::c::B;", "use crate::a::*;"),
    ] {
        let found = of(&[
            ("", ""),
            ("a", one),
            ("b", other),
            ("c", "pub use super::b::B;"),
        ])
        .cycles();
        assert_eq!(found.len(), 1, "{one} {other}");
        assert_eq!(found[0].len(), 2, "{found:?}");
    }
    let three = [
        ("", ""),
        ("a", "use crate::b::B;"),
        ("b", "use crate::c::C;"),
        ("c", "use crate::a::A;"),
    ];
    assert_eq!(
        of(&three).cycles(),
        [["a:1 uses b", "b:1 uses c", "c:1 uses a"]]
    );
}

#[test]
fn a_parent_that_its_child_imports_from_may_re_export_it_and_not_use_it() {
    let with_parent = |parent| {
        of(&[
            ("", ""),
            ("a", parent),
            ("a::b", "use super::A;\npub struct B;"),
        ])
        .cycles()
    };
    assert!(with_parent("mod b;\npub use b::B;\npub struct A;").is_empty());
    assert_eq!(with_parent("mod b;\nuse b::B;\npub struct A(B);").len(), 1);
    assert_eq!(
        with_parent("mod b;\npub use b::B;\npub struct A(B);").len(),
        1
    );
    assert_eq!(with_parent("mod b;\npub struct A(b::B);").len(), 1);
}

#[test]
fn what_only_tests_and_comments_name_is_no_import() {
    let quiet = "// use crate::b::B;\n/// [`B`](crate::b::B)\npub(in crate::b) struct A;\n\
                 #[cfg(test)]\nmod tests { use crate::b::B; }";
    assert!(
        of(&[("", ""), ("a", quiet), ("b", "use crate::a::A;")])
            .cycles()
            .is_empty()
    );
}

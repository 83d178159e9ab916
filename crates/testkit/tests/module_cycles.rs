//! No modules of a folder import each other in a cycle: the files and folders beside a crate's
//! `lib.rs`, and those beside a folder's `mod.rs`. Cargo forbids cycles of crates. Items defined in
//! `lib.rs` and `mod.rs` belong to the folder itself; every file in it may use them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};

/// Groups of files that may import each other, because they are one unit.
const UNITS: &[Unit] = &[Unit {
    folder: "vmhost/task",
    files: &["actor", "end", "phase", "saver", "stop"],
    because: "they are the methods of one task, each file what it does on one occasion",
}];

struct Unit {
    /// `crate` or `crate/folder`.
    folder: &'static str,
    files: &'static [&'static str],
    because: &'static str,
}

/// A module's path from the crate's root.
type Module = Vec<String>;
/// By module: the modules that it imports, each with a file and the imported name.
type ImportGraph = BTreeMap<String, BTreeMap<String, String>>;

#[test]
fn no_modules_import_each_other_in_a_cycle() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    for folder in fs::read_dir(crates).expect("the crates are listed") {
        let folder = folder.expect("it is there").path();
        let name = folder.file_name().expect("it has one").to_string_lossy();
        for (folder, mut graph) in import_graphs(&folder.join("src")) {
            let folder = [&[name.to_string()], &folder[..]].concat().join("/");
            for one in UNITS.iter().filter(|one| one.folder == folder) {
                wrong.extend(merge(&mut graph, one));
            }
            if let Some(cycle) = shortest_cycle(&graph) {
                wrong.push(format!("{folder}: {cycle}"));
            }
            seen.insert(folder);
        }
    }
    for folder in UNITS.iter().map(|one| one.folder) {
        if !seen.contains(folder) {
            wrong.push(format!(
                "UNITS lists {folder}, but no modules in it import each other: remove it"
            ));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn a_cycle_through_a_reexport_is_found() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("lib.rs", "mod a; mod b; mod c; pub use b::Second;");
    write("a.rs", "use crate::Second; pub struct First;");
    write(
        "b.rs",
        "mod inner { fn it() { vec![super::super::a::First]; } } pub struct Second;",
    );
    write(
        "c.rs",
        "use crate::a::First; #[cfg(test)] mod tests { use crate::b; }",
    );
    let graph = &import_graphs(folder.path())[&Vec::new()];
    assert_eq!(
        shortest_cycle(graph).unwrap(),
        "a -> b (a.rs: Second), b -> a (b.rs: First)"
    );
    assert_eq!(graph["c"].keys().collect::<Vec<_>>(), ["a"]);
}

#[test]
fn a_cycle_through_an_attribute_is_found() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("lib.rs", "mod error; mod format;");
    write(
        "error.rs",
        r#"#[error("more than {}", crate::format::MOST)] pub struct Error;"#,
    );
    write(
        "format.rs",
        "use crate::error::Error; pub const MOST: u32 = 1;",
    );
    let graph = &import_graphs(folder.path())[&Vec::new()];
    assert_eq!(
        shortest_cycle(graph).unwrap(),
        "error -> format (error.rs: MOST), format -> error (format.rs: Error)"
    );
}

#[test]
fn a_cycle_in_a_folder_is_found_unless_it_is_listed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    fs::create_dir(folder.path().join("disk")).expect("a temporary folder");
    write("lib.rs", "mod disk;");
    write("disk/mod.rs", "mod read; mod write; pub struct Disk;");
    write(
        "disk/read.rs",
        "use super::{Disk, write::Log}; pub struct Map;",
    );
    write("disk/write.rs", "use super::read::Map; pub struct Log;");
    let graph = import_graphs(folder.path());
    let mut graph = graph[&vec!["disk".to_owned()]].clone();
    assert_eq!(
        shortest_cycle(&graph).unwrap(),
        "read -> write (disk/read.rs: Log), write -> read (disk/write.rs: Map)"
    );
    let one = Unit {
        folder: "x/disk",
        files: &["read", "write"],
        because: "a read looks into the log",
    };
    assert_eq!(merge(&mut graph, &one), None);
    assert_eq!(shortest_cycle(&graph), None);
    let complaint = merge(&mut graph, &one).expect("they are no cycle any more");
    assert!(complaint.contains("x/disk"), "{complaint}");
}

/// Merges the files of a unit into one node of the graph. Returns an error text if they are
/// no cycle any more.
fn merge(graph: &mut ImportGraph, one: &Unit) -> Option<String> {
    let files = one.files.iter().map(|file| file.to_string());
    let files: BTreeSet<String> = files.collect();
    let of_them = |(from, to): (&String, &BTreeMap<String, String>)| {
        let to = to.iter().filter(|(to, _)| files.contains(*to));
        let to = to.map(|(to, import)| (to.clone(), import.clone()));
        files
            .contains(from)
            .then(|| (from.clone(), to.collect::<BTreeMap<_, _>>()))
    };
    let inner: ImportGraph = graph.iter().filter_map(of_them).collect();
    let is_in_cycle = |file: &String| path_back(&inner, file).is_some();
    if one.because.is_empty() || !files.iter().all(is_in_cycle) {
        return Some(format!(
            "{}: {} are no cycle any more, or have no reason: remove them from UNITS",
            one.folder,
            one.files.join(", ")
        ));
    }
    let unit = one.files.join("+");
    let mut merged = ImportGraph::new();
    for (from, to) in std::mem::take(graph) {
        for (to, import) in to {
            let name = |file: &String| match files.contains(file) {
                true => unit.clone(),
                false => file.clone(),
            };
            let (from, to) = (name(&from), name(&to));
            if from != to {
                merged.entry(from).or_default().entry(to).or_insert(import);
            }
        }
    }
    *graph = merged;
    None
}

/// The shortest cycle, with the imports that make it.
fn shortest_cycle(graph: &ImportGraph) -> Option<String> {
    let cycle = graph
        .keys()
        .filter_map(|start| path_back(graph, start))
        .min_by_key(Vec::len)?;
    let paths = cycle.windows(2).map(|pair| {
        let (from, to) = (pair[0], pair[1]);
        format!("{from} -> {to} ({})", graph[from][to])
    });
    Some(paths.collect::<Vec<_>>().join(", "))
}

/// The shortest path from a module back to itself.
fn path_back<'a>(graph: &'a ImportGraph, start: &'a str) -> Option<Vec<&'a str>> {
    let mut paths = VecDeque::from([vec![start]]);
    let mut seen = BTreeSet::new();
    while let Some(path) = paths.pop_front() {
        for next in graph
            .get(*path.last()?)
            .into_iter()
            .flat_map(BTreeMap::keys)
        {
            let further = [&path[..], &[next]].concat();
            if next == start {
                return Some(further);
            }
            if seen.insert(next) {
                paths.push_back(further);
            }
        }
    }
    None
}

/// By folder of a crate: the imports between the modules in it.
fn import_graphs(src: &Path) -> BTreeMap<Module, ImportGraph> {
    let mut krate = Crate::default();
    for root in ["lib.rs", "main.rs"] {
        // If the crate has a library too, its program is a module that may import all others.
        if src.join(root).exists() {
            krate.read(&src.join(root), src, Vec::new());
        }
    }
    let mut graph: BTreeMap<Module, ImportGraph> = BTreeMap::new();
    for (from, file, path) in &krate.imports {
        let Some(to) = krate.target(from, path) else {
            continue;
        };
        let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
        let (Some(from_module), Some(to_module)) = (from.get(shared), to.get(shared)) else {
            continue;
        };
        let name = path.last().map_or("", String::as_str);
        let file = file.strip_prefix(src).unwrap_or(file).display();
        graph
            .entry(from[..shared].to_vec())
            .or_default()
            .entry(from_module.clone())
            .or_default()
            .entry(to_module.clone())
            .or_insert_with(|| format!("{file}: {name}"));
    }
    graph
}

/// The modules of a crate and their imports.
#[derive(Default)]
struct Crate {
    modules: BTreeSet<Module>,
    imports: Vec<(Module, PathBuf, Vec<String>)>,
    /// Names that a module re-exports.
    reexports: BTreeMap<(Module, String), Vec<String>>,
}

impl Crate {
    /// Reads a module's file and its submodules, which are in `folder`.
    fn read(&mut self, file: &Path, folder: &Path, module: Module) {
        let text = fs::read_to_string(file).expect("a module's file is read");
        let parsed = syn::parse_file(&text).expect("it is Rust");
        self.modules.insert(module.clone());
        let mut reader = Reader {
            krate: self,
            file,
            folder: folder.to_owned(),
            module,
        };
        reader.visit_file(&parsed);
    }

    /// The module that defines the item of this path; `None` if it is of another crate.
    fn target(&self, from: &Module, path: &[String]) -> Option<Module> {
        let mut path = path.to_vec();
        let mut at = match path.first()?.as_str() {
            "crate" => Vec::new(),
            "self" => from.clone(),
            "super" => from[..from.len().checked_sub(1)?].to_vec(),
            first => {
                let child = [&from[..], &[first.to_owned()]].concat();
                path.insert(0, "self".into());
                self.modules.contains(&child).then(|| from.clone())?
            }
        };
        path.remove(0);
        while let Some(name) = path.first().cloned() {
            let child = [&at[..], std::slice::from_ref(&name)].concat();
            if name == "super" {
                at.pop()?;
            } else if self.modules.contains(&child) {
                at = child;
            } else if let Some(other) = self.reexports.get(&(at.clone(), name)) {
                let rest = [other, &path[1..]].concat();
                return self.target(&at, &rest);
            } else {
                break;
            }
            path.remove(0);
        }
        Some(at)
    }
}

struct Reader<'a> {
    krate: &'a mut Crate,
    file: &'a Path,
    folder: PathBuf,
    module: Module,
}

impl Reader<'_> {
    fn import(&mut self, path: Vec<String>) {
        let import = (self.module.clone(), self.file.to_owned(), path);
        self.krate.imports.push(import);
    }

    /// Arguments of a macro or an attribute, which are not parsed: paths that begin with `crate::` or
    /// `super::` are taken from their text.
    fn unparsed(&mut self, text: &str) {
        let text = text.replace(' ', "");
        let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        for path in text.split(|c| !is_part(c)) {
            if path.starts_with("crate::") || path.starts_with("super::") {
                self.import(path.split("::").map(str::to_owned).collect());
            }
        }
    }

    fn uses(&mut self, before: &[String], tree: &syn::UseTree, is_public: bool) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        let (path, name) = match tree {
            syn::UseTree::Path(path) => {
                return self.uses(&with(&path.ident), &path.tree, is_public);
            }
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.uses(before, tree, is_public);
                }
                return;
            }
            syn::UseTree::Glob(_) => (before.to_vec(), None),
            syn::UseTree::Name(name) => (with(&name.ident), Some(name.ident.to_string())),
            syn::UseTree::Rename(name) => (with(&name.ident), Some(name.rename.to_string())),
        };
        if let Some(name) = name.filter(|_| is_public) {
            let key = (self.module.clone(), name);
            self.krate.reexports.insert(key, path.clone());
        }
        self.import(path);
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !is_for_tests(item) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let is_public = !matches!(item.vis, syn::Visibility::Inherited);
        self.uses(&[], &item.tree, is_public);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let name = item.ident.to_string();
        let module = [&self.module[..], std::slice::from_ref(&name)].concat();
        let folder = self.folder.join(&name);
        if item.content.is_some() {
            self.krate.modules.insert(module.clone());
            let outer = (
                std::mem::replace(&mut self.module, module),
                self.folder.clone(),
            );
            self.folder = folder;
            visit::visit_item_mod(self, item);
            (self.module, self.folder) = outer;
            return;
        }
        let file = self.folder.join(format!("{name}.rs"));
        let file = if file.exists() {
            file
        } else {
            folder.join("mod.rs")
        };
        if file.exists() {
            self.krate.read(&file, &folder, module);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names = path
            .segments
            .iter()
            .map(|segment| segment.ident.to_string());
        self.import(names.collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, invocation: &'ast syn::Macro) {
        self.unparsed(&invocation.tokens.to_string());
        visit::visit_macro(self, invocation);
    }

    /// An attribute's arguments: an error's message, the module of a field's encoding.
    fn visit_meta_list(&mut self, list: &'ast syn::MetaList) {
        self.unparsed(&list.tokens.to_string());
        visit::visit_meta_list(self, list);
    }
}

/// Whether an item is compiled only for tests, or is a test helper.
fn is_for_tests(item: &syn::Item) -> bool {
    let attributes = match item {
        syn::Item::Mod(item) if item.ident == "testing" || item.ident == "tests" => return true,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        _ => return false,
    };
    attributes.iter().any(|attribute| {
        let condition = attribute
            .meta
            .require_list()
            .map(|list| list.tokens.to_string());
        attribute.path().is_ident("cfg") && condition.is_ok_and(|tokens| tokens.contains("test"))
    })
}

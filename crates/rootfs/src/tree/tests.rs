use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn file(mode: u16) -> (Kind, Attributes) {
    (Kind::File(Content::default()), of_mode(mode))
}

fn of_mode(mode: u16) -> Attributes {
    Attributes {
        mode,
        ..Attributes::default()
    }
}

/// Every path with its mode; a folder's path ends in a slash.
fn paths(tree: &Tree) -> BTreeMap<String, u16> {
    let mut out = BTreeMap::new();
    let mut stack = vec![(String::new(), tree.root())];
    while let Some((path, id)) = stack.pop() {
        let node = tree.node(id);
        let Kind::Folder(children) = &node.kind else {
            out.insert(path, node.attributes.mode);
            continue;
        };
        out.insert(format!("{path}/"), node.attributes.mode);
        for (name, child) in children {
            let name = String::from_utf8_lossy(name);
            stack.push((format!("{path}/{name}"), child.id));
        }
    }
    out
}

#[derive(Debug, Clone)]
enum Op {
    File(String, u16),
    Folder(String, u16),
    Link(String, String),
    Whiteout(String),
    Opaque(String),
}

fn apply(tree: &mut Tree, layers: &[Vec<Op>]) -> Result<(), NameError> {
    for layer in layers {
        tree.begin_layer();
        for op in layer {
            match op {
                Op::File(path, mode) => {
                    let (kind, attributes) = file(*mode);
                    tree.insert(path.as_bytes(), kind, attributes)?;
                }
                Op::Folder(path, mode) => {
                    tree.insert(path.as_bytes(), Kind::folder(), of_mode(*mode))?;
                }
                Op::Link(path, target) => tree.hard_link(path.as_bytes(), target.as_bytes())?,
                Op::Whiteout(path) => tree.white_out(path.as_bytes())?,
                Op::Opaque(path) => tree.make_opaque(path.as_bytes())?,
            }
        }
        tree.end_layer();
    }
    Ok(())
}

fn flattened(layers: &[Vec<Op>]) -> Result<BTreeMap<String, u16>, NameError> {
    let mut tree = Tree::default();
    apply(&mut tree, layers).map(|()| paths(&tree))
}

fn f(path: &str) -> Op {
    Op::File(path.into(), 0o644)
}

fn names(layers: &[Vec<Op>]) -> Vec<String> {
    flattened(layers).unwrap().into_keys().collect()
}

#[test]
fn a_whiteout_hides_lower_layers_only() {
    let wh = |path: &str| Op::Whiteout(path.into());
    let lower = vec![f("a/x"), f("a/y"), f("b")];
    assert_eq!(
        names(&[lower.clone(), vec![wh("a/x"), wh("b"), wh("absent")]]),
        ["/", "/a/", "/a/y"]
    );
    for order in [vec![wh("a"), f("a/z")], vec![f("a/z"), wh("a")]] {
        assert_eq!(names(&[lower.clone(), order]), ["/", "/a/", "/a/z", "/b"]);
    }
    assert_eq!(
        names(&[lower, vec![f("b2"), Op::Opaque("/".into())]]),
        ["/", "/b2"]
    );
}

#[test]
fn an_opaque_folder_keeps_its_own_layer() {
    let lower = vec![f("a/x"), f("a/sub/y"), f("a/gone/z")];
    let upper = vec![f("a/new"), Op::Opaque("a".into()), f("a/sub/own")];
    assert_eq!(
        names(&[lower, upper]),
        ["/", "/a/", "/a/new", "/a/sub/", "/a/sub/own"]
    );
}

#[test]
fn types_replace_one_another_across_layers() {
    let both = [f("a"), f("a/inside")];
    assert_eq!(
        names(&[vec![both[0].clone()], vec![both[1].clone()]]),
        ["/", "/a/", "/a/inside"]
    );
    assert_eq!(
        names(&[vec![both[1].clone()], vec![both[0].clone()]]),
        ["/", "/a"]
    );
    let within = flattened(&[both.to_vec()]).unwrap_err();
    assert_eq!(within, NameError::ParentNotFolder("a".into()));
}

#[test]
fn the_contents_of_a_replaced_folder_do_not_come_back() {
    let layers = [vec![f("a/old")], vec![f("a")], vec![f("a/new")]];
    assert_eq!(names(&layers), ["/", "/a/", "/a/new"]);
}

#[test]
fn a_hard_link_keeps_what_its_target_loses() {
    let layers = [
        vec![Op::File("a".into(), 0o600)],
        vec![Op::Link("b".into(), "a".into()), Op::Whiteout("a".into())],
        vec![Op::File("a".into(), 0o400)],
    ];
    let found = flattened(&layers).unwrap();
    assert_eq!((found["/a"], found["/b"]), (0o400, 0o600));
}

#[test]
fn hostile_names_are_refused() {
    let mut tree = Tree::default();
    tree.begin_layer();
    let mut insert = |path: &[u8]| {
        tree.insert(path, file(0).0, Attributes::default())
            .map(|_| ())
    };
    insert(b"file").unwrap();
    assert_eq!(insert(b"../x"), Err(NameError::Climbs));
    assert_eq!(insert(b"a/../../x"), Err(NameError::Climbs));
    assert_eq!(insert(b"file"), Err(NameError::Twice));
    assert_eq!(insert(b"./file"), Err(NameError::Twice));
    let below = Err(NameError::ParentNotFolder("file".into()));
    assert_eq!(insert(b"file/below"), below);
    assert_eq!(insert(b"/"), Err(NameError::Root));
    assert_eq!(insert(b"a\0b"), Err(NameError::Nul));
    assert_eq!(insert(&[b'x'; 256]), Err(NameError::TooLong));
    let mut link = |target: &[u8]| tree.hard_link(b"l", target);
    assert!(matches!(link(b"nothing"), Err(NameError::NoTarget(_))));
    assert!(matches!(link(b"/"), Err(NameError::NoTarget(_))));
    assert!(matches!(link(b"../file"), Err(NameError::NoTarget(_))));
    assert_eq!(tree.white_out(b"/"), Err(NameError::EmptyWhiteout));
    assert_eq!(tree.white_out(b"../x"), Err(NameError::Climbs));
    assert_eq!(tree.nodes().len(), 2, "a refused name adds no nodes");
}

#[test]
fn implied_folders_count_against_the_limit() {
    let mut tree = Tree::new(100, u64::MAX);
    tree.begin_layer();
    let deep = "d/".repeat(101);
    let result = tree.insert(deep.as_bytes(), Kind::folder(), Attributes::default());
    assert_eq!(result, Err(NameError::TooMany(100)));

    let mut tree = Tree::new(u64::MAX, 1000);
    tree.begin_layer();
    let (kind, _) = file(0);
    let mut attributes = Attributes::default();
    attributes.xattrs.insert(b"user.x".to_vec(), vec![0; 2000]);
    let result = tree.insert(b"f", kind, attributes);
    assert_eq!(result, Err(NameError::TooLarge(1000)));
}

#[test]
fn a_large_hole_counts_with_its_table_of_chunks() {
    let holes = |size: u64| {
        Kind::File(Content {
            size,
            ..Content::default()
        })
    };
    // A file of a gibibyte has 2^18 chunks; a larger file has larger chunks, not more of them.
    for (size, table) in [
        (0, 0),
        ((1 << 20) - 4096, 0),
        (1 << 20, 1 << 10),
        (1 << 30, 1 << 20),
        (1 << 40, 1 << 20),
        (u64::MAX, 0),
    ] {
        assert_eq!(weight(&holes(size)), table, "{size}");
    }
    let piece = Piece {
        at: 0,
        len: 1 << 30,
        from: 0,
        input: Input::File(0),
    };
    let full = Kind::File(Content {
        size: 1 << 30,
        pieces: Box::from([piece]),
        path: None,
    });
    assert_eq!(weight(&full), size_of::<Piece>() as u64);
    let mut tree = Tree::new(u64::MAX, 3 << 20);
    tree.begin_layer();
    let mut add = |name: &[u8]| tree.insert(name, holes(1 << 30), Attributes::default());
    add(b"a").unwrap();
    add(b"b").unwrap();
    assert_eq!(add(b"c"), Err(NameError::TooLarge(3 << 20)));
}

/// A simple model of the same rules: a map of paths.
#[derive(Clone, Default)]
struct Model(BTreeMap<String, (bool, u16)>);

impl Model {
    fn remove(&mut self, path: &str, itself: bool) {
        let below = format!("{path}/");
        self.0
            .retain(|other, _| !(other.starts_with(&below) || (itself && other == path)));
    }

    fn make_folders(&mut self, path: &str, own: &mut BTreeSet<String>) -> Result<(), ()> {
        let ends = path.match_indices('/').map(|(at, _)| at).skip(1);
        for end in ends.chain((path.len() > 1).then_some(path.len())) {
            let folder = &path[..end];
            match self.0.get(folder) {
                Some((true, _)) => {}
                Some((false, _)) if own.contains(folder) => return Err(()),
                _ => {
                    self.0.insert(folder.into(), (true, 0o755));
                }
            }
            own.insert(folder.into());
        }
        Ok(())
    }

    fn put(
        &mut self,
        path: &str,
        is_folder: bool,
        mode: u16,
        own: &mut BTreeSet<String>,
    ) -> Result<(), ()> {
        self.make_folders(&path[..path.rfind('/').unwrap()], own)?;
        match self.0.get(path) {
            Some((true, _)) if is_folder => {}
            Some(_) if own.contains(path) => return Err(()),
            _ => self.remove(path, true),
        }
        own.insert(path.into());
        self.0.insert(path.into(), (is_folder, mode));
        Ok(())
    }

    fn layer(&mut self, layer: &[Op]) -> Result<(), ()> {
        // A hard link may refer to a file that the layer hides, so both states are kept.
        let mut unhidden = self.clone();
        for op in layer {
            match op {
                Op::Whiteout(path) => self.remove(path, true),
                // An opaque mark on a file changes nothing: a file has no entries.
                Op::Opaque(path) => self.remove(path, false),
                _ => {}
            }
        }
        let (mut own, mut own_unhidden) = (BTreeSet::new(), BTreeSet::new());
        for op in layer {
            let mut put = |path: &str, is_folder, mode| {
                unhidden.put(path, is_folder, mode, &mut own_unhidden)?;
                self.put(path, is_folder, mode, &mut own)
            };
            match op {
                Op::File(path, mode) => put(path, false, *mode)?,
                Op::Folder(path, mode) => put(path, true, *mode)?,
                Op::Link(path, target) => {
                    let (is_folder, mode) = *unhidden.0.get(target).ok_or(())?;
                    if is_folder {
                        return Err(());
                    }
                    unhidden.put(path, false, mode, &mut own_unhidden)?;
                    self.put(path, false, mode, &mut own)?;
                }
                Op::Whiteout(_) => {}
                Op::Opaque(path) => {
                    unhidden.make_folders(path, &mut own_unhidden)?;
                    self.make_folders(path, &mut own)?;
                }
            }
        }
        Ok(())
    }

    fn paths(&self) -> BTreeMap<String, u16> {
        let name = |(path, (is_folder, mode)): (&String, &(bool, u16))| {
            let slash = if *is_folder { "/" } else { "" };
            (format!("{path}{slash}"), *mode)
        };
        let root = ("/".to_owned(), 0o755);
        self.0.iter().map(name).chain([root]).collect()
    }
}

fn any_op() -> impl Strategy<Value = Op> {
    let path = || "(/[abc]){1,4}";
    // Entries have different modes, so that a wrong one is noticed.
    prop_oneof![
        4 => (path(), 0..0o7777u16).prop_map(|(path, mode)| Op::File(path, mode)),
        3 => (path(), 0..0o7777u16).prop_map(|(path, mode)| Op::Folder(path, mode)),
        1 => (path(), path()).prop_map(|(path, target)| Op::Link(path, target)),
        2 => path().prop_map(Op::Whiteout),
        1 => path().prop_map(Op::Opaque),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn layers_flatten_as_the_plain_model_says(
        layers in proptest::collection::vec(proptest::collection::vec(any_op(), 0..7), 1..5)
    ) {
        // Both must refuse at the same layer; the comparison ends there.
        let mut model = Model::default();
        for count in 1..=layers.len() {
            let expected = model.layer(&layers[count - 1]);
            let found = flattened(&layers[..count]);
            prop_assert_eq!(expected.is_ok(), found.is_ok(), "{:?}", found);
            let Ok(found) = found else { break };
            prop_assert_eq!(model.paths(), found);
        }
    }
}

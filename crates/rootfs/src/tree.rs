//! The names and attributes of a file system being made.
//!
//! The tree lives in memory, contents don't: names come from an archive
//! somebody else wrote, so `..`, absolute paths and links are settled here,
//! where no host path exists to escape to.

use std::collections::BTreeMap;
use thiserror::Error;

/// Index of a node in its [`Tree`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NodeId(pub(crate) usize);

/// Longest name of one entry, bytes (Linux NAME_MAX).
pub const MAX_NAME: usize = 255;
/// Longest path, bytes (Linux PATH_MAX, with its NUL).
pub const MAX_PATH: usize = 4095;

/// Owner, permissions and time of an entry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Permission bits, 07777.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time, seconds since 1970.
    pub mtime: u64,
    /// Extended attributes by full name (`security.capability`).
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Where a file's (or link's) bytes were put.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Content {
    /// Bytes in all.
    pub size: u64,
    /// First block of the whole blocks in the image.
    pub first_block: u32,
    /// Offset in the spool of the bytes after the last whole block.
    pub tail_offset: u64,
    /// How many those are; 0 when all bytes are in blocks.
    pub tail_len: u16,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A folder and its entries by name.
    Folder(BTreeMap<Box<[u8]>, NodeId>),
    /// A regular file.
    File(Content),
    /// A symbolic link; the content is its target.
    Symlink(Content),
    /// A character device, major and minor.
    CharDevice(u32, u32),
    /// A block device, major and minor.
    BlockDevice(u32, u32),
    /// A named pipe.
    Fifo,
}

/// A file, folder, link or device.
#[derive(Debug, Clone)]
pub struct Node {
    /// What it is.
    pub kind: Kind,
    /// Owner, permissions, time.
    pub attributes: Attributes,
    /// Names that refer to it (a folder's own `.` and its children's `..` counted).
    pub links: u32,
}

/// A name can't be added to the tree.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum NameError {
    /// A component is `..`.
    #[error("it climbs out with \"..\"")]
    Climbs,
    /// A component is longer than [`MAX_NAME`], or the whole than [`MAX_PATH`].
    #[error("the name is too long")]
    TooLong,
    /// It holds a NUL byte.
    #[error("the name holds a NUL byte")]
    Nul,
    /// A parent exists and is no folder.
    #[error("\"{0}\" on its way is not a folder")]
    ParentNotFolder(String),
    /// The name is there already.
    #[error("the archive has that name twice")]
    Twice,
    /// It names the root, which is always a folder.
    #[error("the root can only be a folder")]
    Root,
    /// A hard link names nothing that came before it.
    #[error("it links to \"{0}\", which is not a file that came before it")]
    NoTarget(String),
    /// More names than a file system may link to one file.
    #[error("too many links to one file")]
    TooManyLinks,
}

/// A file system's names.
#[derive(Debug)]
pub struct Tree {
    nodes: Vec<Node>,
}

impl Default for Tree {
    fn default() -> Tree {
        Tree::new()
    }
}

impl Tree {
    /// A root folder and nothing in it.
    pub fn new() -> Tree {
        Tree {
            nodes: vec![Node {
                kind: Kind::Folder(BTreeMap::new()),
                attributes: folder_attributes(),
                links: 2,
            }],
        }
    }

    /// The root folder.
    pub fn root(&self) -> NodeId {
        NodeId(0)
    }

    /// The node of that id.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0]
    }

    /// All nodes, by id.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Adds an entry; missing parents become folders of mode 0755 owned by
    /// root. A folder that exists takes the new attributes; any other name
    /// that exists is refused.
    pub fn insert(
        &mut self,
        path: &[u8],
        kind: Kind,
        attributes: Attributes,
    ) -> Result<NodeId, NameError> {
        let is_folder = matches!(kind, Kind::Folder(_));
        let components = components(path)?;
        let Some((name, parents)) = components.split_last() else {
            if !is_folder {
                return Err(NameError::Root);
            }
            self.nodes[0].attributes = attributes;
            return Ok(self.root());
        };
        let parent = self.make_parents(parents)?;
        if let Some(existing) = self.child(parent, name) {
            if is_folder && matches!(self.node(existing).kind, Kind::Folder(_)) {
                self.nodes[existing.0].attributes = attributes;
                return Ok(existing);
            }
            return Err(NameError::Twice);
        }
        Ok(self.add_child(parent, name, kind, attributes))
    }

    /// Checks that `path` could be inserted as something other than a folder,
    /// before its bytes are written.
    pub fn check_new(&self, path: &[u8]) -> Result<(), NameError> {
        let components = components(path)?;
        if components.is_empty() {
            return Err(NameError::Root);
        }
        let mut at = self.root();
        let mut parent: &[u8] = b"/";
        for name in components {
            if !matches!(self.node(at).kind, Kind::Folder(_)) {
                let parent = String::from_utf8_lossy(parent).into_owned();
                return Err(NameError::ParentNotFolder(parent));
            }
            match self.child(at, name) {
                Some(next) => (at, parent) = (next, name),
                None => return Ok(()),
            }
        }
        Err(NameError::Twice)
    }

    /// Adds a second name for a file that is there.
    pub fn hard_link(&mut self, path: &[u8], target: &[u8]) -> Result<(), NameError> {
        let no_target = || NameError::NoTarget(String::from_utf8_lossy(target).into_owned());
        let id = self
            .find(target)
            .filter(|id| !matches!(self.node(*id).kind, Kind::Folder(_)))
            .ok_or_else(no_target)?;
        let components = components(path)?;
        let (name, parents) = components.split_last().ok_or(NameError::Root)?;
        let links = self
            .node(id)
            .links
            .checked_add(1)
            .ok_or(NameError::TooManyLinks)?;
        let parent = self.make_parents(parents)?;
        if self.child(parent, name).is_some() {
            return Err(NameError::Twice);
        }
        self.nodes[id.0].links = links;
        if let Kind::Folder(children) = &mut self.nodes[parent.0].kind {
            children.insert((*name).into(), id);
        }
        Ok(())
    }

    fn find(&self, path: &[u8]) -> Option<NodeId> {
        components(path)
            .ok()?
            .into_iter()
            .try_fold(self.root(), |at, name| self.child(at, name))
    }

    fn child(&self, folder: NodeId, name: &[u8]) -> Option<NodeId> {
        match &self.node(folder).kind {
            Kind::Folder(children) => children.get(name).copied(),
            _ => None,
        }
    }

    fn make_parents(&mut self, parents: &[&[u8]]) -> Result<NodeId, NameError> {
        let mut at = self.root();
        for name in parents {
            at = match self.child(at, name) {
                Some(next) if matches!(self.node(next).kind, Kind::Folder(_)) => next,
                Some(_) => {
                    return Err(NameError::ParentNotFolder(
                        String::from_utf8_lossy(name).into_owned(),
                    ));
                }
                None => {
                    self.add_child(at, name, Kind::Folder(BTreeMap::new()), folder_attributes())
                }
            };
        }
        Ok(at)
    }

    fn add_child(
        &mut self,
        parent: NodeId,
        name: &[u8],
        kind: Kind,
        attributes: Attributes,
    ) -> NodeId {
        let is_folder = matches!(kind, Kind::Folder(_));
        let id = NodeId(self.nodes.len());
        self.nodes.push(Node {
            kind,
            attributes,
            links: if is_folder { 2 } else { 1 },
        });
        let parent = &mut self.nodes[parent.0];
        if is_folder {
            parent.links += 1;
        }
        if let Kind::Folder(children) = &mut parent.kind {
            children.insert(name.into(), id);
        }
        id
    }
}

fn folder_attributes() -> Attributes {
    Attributes {
        mode: 0o755,
        ..Attributes::default()
    }
}

/// The components of a path, taken relative to the root: leading slashes,
/// empty components and `.` are dropped.
fn components(path: &[u8]) -> Result<Vec<&[u8]>, NameError> {
    if path.len() > MAX_PATH {
        return Err(NameError::TooLong);
    }
    if path.contains(&0) {
        return Err(NameError::Nul);
    }
    let names: Vec<&[u8]> = path
        .split(|byte| *byte == b'/')
        .filter(|name| !name.is_empty() && *name != b".")
        .collect();
    if names.contains(&b"..".as_slice()) {
        return Err(NameError::Climbs);
    }
    if names.iter().any(|name| name.len() > MAX_NAME) {
        return Err(NameError::TooLong);
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file() -> Kind {
        Kind::File(Content::default())
    }

    #[test]
    fn links_count_names_and_folders() {
        let mut tree = Tree::new();
        let a = tree
            .insert(b"a/b/file", file(), Attributes::default())
            .unwrap();
        tree.hard_link(b"a/second", b"/a/b/file").unwrap();
        assert_eq!(tree.node(a).links, 2);
        assert_eq!(tree.node(tree.root()).links, 3, "., .. and a/..");
        assert_eq!(tree.node(tree.find(b"a").unwrap()).links, 3);
    }

    #[test]
    fn hostile_names_are_refused() {
        let mut tree = Tree::new();
        let mut insert = |path: &[u8]| tree.insert(path, file(), Attributes::default());
        insert(b"file").unwrap();
        assert_eq!(insert(b"../x"), Err(NameError::Climbs));
        assert_eq!(insert(b"a/../../x"), Err(NameError::Climbs));
        assert_eq!(insert(b"file"), Err(NameError::Twice));
        assert_eq!(insert(b"./file"), Err(NameError::Twice));
        assert_eq!(
            insert(b"file/below"),
            Err(NameError::ParentNotFolder("file".into()))
        );
        assert_eq!(insert(b"/"), Err(NameError::Root));
        assert_eq!(insert(b"a\0b"), Err(NameError::Nul));
        assert_eq!(insert(&[b'x'; 256]), Err(NameError::TooLong));
        assert!(matches!(
            tree.hard_link(b"l", b"nothing"),
            Err(NameError::NoTarget(_))
        ));
        assert!(matches!(
            tree.hard_link(b"l", b"/"),
            Err(NameError::NoTarget(_))
        ));
        assert_eq!(tree.nodes().len(), 2, "a refused name leaves nothing");
    }

    proptest! {
        #[test]
        fn check_new_agrees_with_insert(paths in proptest::collection::vec("[ab./]{1,6}", 1..12)) {
            let mut tree = Tree::new();
            for path in paths {
                let predicted = tree.check_new(path.as_bytes()).is_ok();
                let happened = tree.insert(path.as_bytes(), file(), Attributes::default()).is_ok();
                prop_assert_eq!(predicted, happened, "{}", path);
            }
        }
    }
}

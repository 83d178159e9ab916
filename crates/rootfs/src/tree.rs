//! The names and attributes of a file system that is made from layers.
//!
//! The tree is in memory, contents are not. Names come from untrusted archives, so `..`, absolute
//! paths and links are resolved here, where they can't reach a path of the host.
//!
//! Rules for a layer's entries (OCI image-spec `layer.md`; where it is silent, what Docker and
//! containerd do on overlayfs):
//!
//! * A name replaces whatever a lower layer had there. A folder over a folder keeps the entries and
//!   takes the new attributes.
//! * An entry below something that is not a folder: if that is of a lower layer, a folder replaces
//!   it; if it is of the same layer, the entry is refused. So links are never followed. Docker and
//!   containerd do the same when they unpack each layer into an upper folder of its own. umoci
//!   follows the link within the root, so the meaning of a layer depends on the layers below.
//! * The same name twice in one layer is refused, except for folders (the last one's attributes
//!   apply). With other tools the last one wins, which disagrees with scanners that read the first.
//! * Whiteouts hide names of lower layers, never names of their own layer, at any position in the
//!   layer.
//! * A hard link refers to a file of a lower layer, or to an earlier file of its own layer.

mod node;

use crate::chunk_table;
pub use node::{Attributes, Content, FolderFile, Input, Kind, Name, Node, Origin, Piece};
use thiserror::Error;

/// Index of a node in its [`Tree`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NodeId(pub(crate) usize);

/// Longest name of an entry, bytes (Linux NAME_MAX).
pub const MAX_NAME: usize = 255;
/// Longest path, bytes (Linux PATH_MAX without the NUL).
pub const MAX_PATH: usize = 4095;

/// Why a name can't be added to the tree.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum NameError {
    /// The path has a `..`.
    #[error("it leaves the root folder with \"..\"")]
    Climbs,
    /// A component is longer than [`MAX_NAME`], or the path is longer than [`MAX_PATH`].
    #[error("the name is too long")]
    TooLong,
    /// It contains a NUL byte.
    #[error("the name contains a NUL byte")]
    Nul,
    /// A component of the path is in the same layer and is not a folder.
    #[error("\"{0}\" in its path is not a folder")]
    ParentNotFolder(String),
    /// The layer already has the name.
    #[error("the archive contains that name twice")]
    Twice,
    /// The entry is the root and not a folder.
    #[error("the root can only be a folder")]
    Root,
    /// The hard link's target is not an earlier file.
    #[error("it links to \"{0}\", which is not an earlier file")]
    NoTarget(String),
    /// The whiteout has no name.
    #[error("it is a whiteout without a name")]
    EmptyWhiteout,
    /// There are more entries than this limit.
    #[error("with the folders in its path there are more than {0} entries")]
    TooMany(u64),
    /// Names, links, attributes and maps of holes take more than this limit, bytes.
    #[error("names, attributes and maps of holes are larger than {0} bytes")]
    TooLarge(u64),
}

/// A path of lower layers that the current layer hides.
#[derive(Debug)]
struct Hidden {
    path: Vec<u8>,
    /// Whether only the folder's entries are hidden, not the folder itself.
    only_entries: bool,
}

/// The names and nodes of a file system.
#[derive(Debug)]
pub struct Tree {
    nodes: Vec<Node>,
    layer: u32,
    hidden: Vec<Hidden>,
    bytes: u64,
    max_nodes: u64,
    max_bytes: u64,
}

impl Default for Tree {
    fn default() -> Tree {
        Tree::new(u64::MAX, u64::MAX)
    }
}

impl Tree {
    /// A tree with an empty root folder, at most `max_nodes` entries, and at most `max_bytes` of
    /// names and attributes.
    pub fn new(max_nodes: u64, max_bytes: u64) -> Tree {
        Tree {
            nodes: vec![Node {
                kind: Kind::folder(),
                attributes: folder_attributes(),
                layer: 0,
                origin: None,
                replaced: None,
            }],
            layer: 0,
            hidden: Vec::new(),
            bytes: 0,
            max_nodes,
            max_bytes,
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

    pub(crate) fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0]
    }

    /// All nodes by id, also those without a name.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Begins a new layer above the others.
    pub fn begin_layer(&mut self) {
        self.layer += 1;
    }

    /// Ends a layer: removes what it hides of lower layers.
    pub fn end_layer(&mut self) {
        let mut hidden = std::mem::take(&mut self.hidden);
        // Outer folders first: folders inside them are then done already.
        hidden.sort_by_cached_key(|hidden| split(&hidden.path).count());
        let mut swept = std::collections::HashSet::new();
        for Hidden { path, only_entries } in hidden {
            self.hide(&path, only_entries, &mut swept);
        }
    }

    /// Adds an entry. Missing parents become folders of mode 0755 owned by root.
    ///
    /// # Errors
    ///
    /// If the path is malformed, the layer has the name already, a component is no folder in this
    /// layer, the root would be no folder, or a limit of the tree is exceeded.
    pub fn insert(
        &mut self,
        path: &[u8],
        kind: Kind,
        attributes: Attributes,
    ) -> Result<NodeId, NameError> {
        let components = components(path)?;
        let bytes = attributes
            .xattrs
            .iter()
            .map(|(name, value)| name.len() + value.len() + 100)
            .sum::<usize>();
        self.charge_bytes(bytes as u64 + weight(&kind))?;
        let Some((name, parents)) = components.split_last() else {
            if !kind.is_folder() {
                return Err(NameError::Root);
            }
            self.set_attributes(self.root(), attributes);
            return Ok(self.root());
        };
        let parent = self.make_parents(parents)?;
        let mut replaced = None;
        if let Some(existing) = self.child(parent, name) {
            let both_folders = kind.is_folder() && self.node(existing.id).kind.is_folder();
            if both_folders {
                self.set_attributes(existing.id, attributes);
                self.touch(parent, name);
                return Ok(existing.id);
            }
            if existing.layer == self.layer {
                return Err(NameError::Twice);
            }
            replaced = self.node(existing.id).origin.map(|_| existing.id);
        }
        let id = self.add_child(parent, name, kind, attributes)?;
        self.node_mut(id).replaced = replaced;
        Ok(id)
    }

    /// Adds a name for an existing file.
    ///
    /// # Errors
    ///
    /// If `target` is not an earlier file, or as for [`insert`](Tree::insert).
    pub fn hard_link(&mut self, path: &[u8], target: &[u8]) -> Result<(), NameError> {
        let no_target = || NameError::NoTarget(String::from_utf8_lossy(target).into_owned());
        let id = self
            .find(target)
            .filter(|id| !self.node(*id).kind.is_folder())
            .ok_or_else(no_target)?;
        let components = components(path)?;
        let (name, parents) = components.split_last().ok_or(NameError::Root)?;
        let parent = self.make_parents(parents)?;
        if let Some(existing) = self.child(parent, name)
            && existing.layer == self.layer
        {
            return Err(NameError::Twice);
        }
        self.link(parent, name, id)
    }

    /// Hides a name of lower layers when the layer ends.
    ///
    /// # Errors
    ///
    /// If the path is empty or malformed, or a limit of the tree is exceeded.
    pub fn white_out(&mut self, path: &[u8]) -> Result<(), NameError> {
        if components(path)?.is_empty() {
            return Err(NameError::EmptyWhiteout);
        }
        self.hide_at_layer_end(path, false)
    }

    /// Hides the entries that lower layers have in a folder when the layer ends. Creates the folder
    /// if it doesn't exist.
    ///
    /// # Errors
    ///
    /// As for [`insert`](Tree::insert).
    pub fn make_opaque(&mut self, path: &[u8]) -> Result<(), NameError> {
        let components = components(path)?;
        self.make_parents(&components)?;
        self.hide_at_layer_end(path, true)
    }

    fn hide_at_layer_end(&mut self, path: &[u8], only_entries: bool) -> Result<(), NameError> {
        if self.hidden.len() as u64 >= self.max_nodes {
            return Err(NameError::TooMany(self.max_nodes));
        }
        self.charge_bytes(path.len() as u64 + 64)?;
        let path = path.to_vec();
        self.hidden.push(Hidden { path, only_entries });
        Ok(())
    }

    /// Removes what lower layers have at `path`. `swept` are the folders from which that was
    /// already removed.
    fn hide(
        &mut self,
        path: &[u8],
        only_entries: bool,
        swept: &mut std::collections::HashSet<NodeId>,
    ) {
        let mut at = self.root();
        let mut holder = None;
        for name in split(path) {
            if swept.contains(&at) {
                return;
            }
            match self.child(at, name) {
                Some(next) => (holder, at) = (Some((at, name, next)), next.id),
                None => return,
            }
        }
        if let Some((parent, name, slot)) = holder {
            if !only_entries && slot.layer < self.layer {
                self.remove_child(parent, name);
                return;
            }
            if !only_entries && self.node(at).kind.is_folder() && self.node(at).layer < self.layer {
                // The current layer has entries below the folder, but does not set its attributes.
                self.set_attributes(at, folder_attributes());
            }
        }
        self.sweep(at, swept);
    }

    /// Removes everything of lower layers below a folder.
    fn sweep(&mut self, folder: NodeId, swept: &mut std::collections::HashSet<NodeId>) {
        let mut stack = vec![folder];
        while let Some(at) = stack.pop() {
            let layer = self.layer;
            if !swept.insert(at) {
                continue;
            }
            let (mut inside, mut removed) = (Vec::new(), false);
            if let Kind::Folder(children) = &mut self.nodes[at.0].kind {
                let before = children.len();
                children.retain(|_, name| name.layer == layer);
                removed = children.len() < before;
                inside.extend(children.values().map(|name| name.id));
            }
            if removed {
                self.nodes[at.0].origin = None;
            }
            for id in inside {
                if self.node(id).kind.is_folder() {
                    if self.node(id).layer < layer {
                        self.set_attributes(id, folder_attributes());
                    }
                    stack.push(id);
                }
            }
        }
    }

    /// Finds the node at a path.
    pub fn find(&self, path: &[u8]) -> Option<NodeId> {
        components(path)
            .ok()?
            .into_iter()
            .try_fold(self.root(), |at, name| Some(self.child(at, name)?.id))
    }

    fn child(&self, folder: NodeId, name: &[u8]) -> Option<Name> {
        match &self.node(folder).kind {
            Kind::Folder(children) => children.get(name).copied(),
            _ => None,
        }
    }

    /// Finds or creates the folder at that path; replaces what lower layers have there.
    fn make_parents(&mut self, parents: &[&[u8]]) -> Result<NodeId, NameError> {
        let mut at = self.root();
        for name in parents {
            at = match self.child(at, name) {
                Some(next) if self.node(next.id).kind.is_folder() => {
                    self.touch(at, name);
                    next.id
                }
                Some(next) if next.layer == self.layer => {
                    return Err(NameError::ParentNotFolder(
                        String::from_utf8_lossy(name).into_owned(),
                    ));
                }
                _ => {
                    let layer = self.layer;
                    let id = self.add_child(at, name, Kind::folder(), folder_attributes())?;
                    // Marked as of a lower layer: no entry of this layer set the attributes.
                    self.nodes[id.0].layer = layer.saturating_sub(1);
                    id
                }
            };
        }
        Ok(at)
    }

    /// Records that the current layer has the name.
    fn touch(&mut self, folder: NodeId, name: &[u8]) {
        let layer = self.layer;
        if let Kind::Folder(children) = &mut self.nodes[folder.0].kind
            && let Some(slot) = children.get_mut(name)
        {
            slot.layer = layer;
        }
    }

    fn set_attributes(&mut self, id: NodeId, attributes: Attributes) {
        let node = &mut self.nodes[id.0];
        node.layer = self.layer;
        if node.attributes != attributes {
            node.attributes = attributes;
            node.origin = None;
        }
    }

    /// Adds a node under a name that is new or replaces a lower layer's.
    pub(crate) fn add_child(
        &mut self,
        parent: NodeId,
        name: &[u8],
        kind: Kind,
        attributes: Attributes,
    ) -> Result<NodeId, NameError> {
        if self.nodes.len() as u64 > self.max_nodes {
            return Err(NameError::TooMany(self.max_nodes));
        }
        let id = NodeId(self.nodes.len());
        self.link(parent, name, id)?;
        self.nodes.push(Node {
            kind,
            attributes,
            layer: self.layer,
            origin: None,
            replaced: None,
        });
        Ok(id)
    }

    pub(crate) fn link(
        &mut self,
        parent: NodeId,
        name: &[u8],
        id: NodeId,
    ) -> Result<(), NameError> {
        self.charge_bytes(name.len() as u64)?;
        let layer = self.layer;
        let parent = &mut self.nodes[parent.0];
        parent.origin = None;
        if let Kind::Folder(children) = &mut parent.kind {
            children.insert(name.into(), Name { id, layer });
        }
        Ok(())
    }

    fn remove_child(&mut self, parent: NodeId, name: &[u8]) {
        let parent = &mut self.nodes[parent.0];
        parent.origin = None;
        if let Kind::Folder(children) = &mut parent.kind {
            children.remove(name);
        }
    }

    pub(crate) fn charge_bytes(&mut self, bytes: u64) -> Result<(), NameError> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > self.max_bytes {
            return Err(NameError::TooLarge(self.max_bytes));
        }
        Ok(())
    }
}

/// Bytes of a node's kind that count towards the limit for names, attributes and maps of holes.
pub(crate) fn weight(kind: &Kind) -> u64 {
    match kind {
        Kind::Symlink(target) => target.len() as u64,
        Kind::File(content) => {
            let path = content.path.as_ref().map_or(0, |file| file.path.len());
            let runs = content.pieces.len() * size_of::<Piece>();
            // The chunk tables of all files are in memory at once before any is written.
            (runs + path) as u64 + chunk_table::table_bytes(content.size, content.data_ranges())
        }
        _ => 0,
    }
}

fn folder_attributes() -> Attributes {
    Attributes {
        mode: 0o755,
        ..Attributes::default()
    }
}

/// The components of a path relative to the root; leading slashes, empty components and `.` are
/// dropped.
fn split(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/')
        .filter(|name| !name.is_empty() && *name != b".")
}

/// [`split`], with the path checked.
fn components(path: &[u8]) -> Result<Vec<&[u8]>, NameError> {
    if path.len() > MAX_PATH {
        return Err(NameError::TooLong);
    }
    if path.contains(&0) {
        return Err(NameError::Nul);
    }
    let names: Vec<&[u8]> = split(path).collect();
    if names.contains(&b"..".as_slice()) {
        return Err(NameError::Climbs);
    }
    if names.iter().any(|name| name.len() > MAX_NAME) {
        return Err(NameError::TooLong);
    }
    Ok(names)
}

#[cfg(test)]
mod tests;

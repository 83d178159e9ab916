//! Images: list, import, inspect, remove.

use super::{NAME_TIME, Node, run_to_completion};
use jiffy_content::error::{Error, Result};
use jiffy_content::images::base::BASE;
use jiffy_content::images::import::Which;
use jiffy_content::model::vm::Spec;
use jiffy_wire::api::{Action, Image, ImageSource, Pruned, Subject};
use std::io::Read;
use std::sync::Arc;
use tracing::{info, warn};

impl Node {
    /// All images; the built-in one is made if it isn't there.
    ///
    /// # Errors
    ///
    /// If the folder of images can't be read.
    pub async fn list_images(&self) -> Result<Vec<Image>> {
        if let Err(error) = self.images.find(BASE).await {
            warn!(%error, "the built-in image is missing");
        }
        self.images.list()
    }

    /// Makes an image of a tar. If the client leaves before it has a name, there is none; after that
    /// it is told.
    ///
    /// # Errors
    ///
    /// If the name is not valid, the tar is not an image, there is no disk space, or a VM needs the
    /// image of this name.
    pub async fn import_image(
        self: &Arc<Self>,
        name: &str,
        registry: Option<&str>,
        tar: impl Read + Send + 'static,
        which: Which,
        source: Option<ImageSource>,
    ) -> Result<Image> {
        let name = self.images.new_name(name, registry)?;
        self.release_image(&name).await;
        if self.images.has(&name) {
            self.check_image_unused(&name).await?;
        }
        let made = self.images.import(tar, which, source).await?;
        let node = Arc::clone(self);
        run_to_completion(async move {
            let unused = || node.check_image_unused(&name);
            let image = node.images.keep(&name, made, unused).await?;
            node.image_changed(&name, Action::Created);
            info!(image = name, digest = image.digest, "image imported");
            Ok(image)
        })
        .await
    }

    /// One image, with the VMs that need it.
    ///
    /// # Errors
    ///
    /// If the name is not valid, or there is no such image.
    pub async fn inspect_image(&self, name: &str, registry: Option<&str>) -> Result<Image> {
        let found = self.images.resolve(name, registry).await?;
        let mut image = self.images.shown(&found)?;
        let users = self.registry.all();
        let users = users
            .iter()
            .filter(|vm| vm.spec.image == image.name && !vm.spec.hidden);
        image.used_by = users.map(|vm| vm.name.clone()).collect();
        Ok(image)
    }

    /// Ends hidden VMs of an image, and waits for VMs that are being removed.
    pub(crate) async fn release_image(&self, name: &str) {
        self.end_hidden_vms(|spec| spec.image == name).await;
        self.wait_for_removal(|vm| vm.spec.image == name).await;
    }

    /// Removes images that can be pulled again and that no VM needs.
    ///
    /// # Errors
    ///
    /// If the folder of images can't be read; an image that can't be removed is kept.
    pub async fn prune_images(self: &Arc<Self>) -> Result<Pruned> {
        self.end_hidden_vms(|spec| spec.image.contains('/')).await;
        let all = Arc::clone(self);
        run_to_completion(async move {
            let node = &all;
            let pruned = node
                .images
                .prune(|name| async move { node.check_image_unused(&name).await })
                .await?;
            for name in &pruned.names {
                node.image_changed(name, Action::Removed);
            }
            Ok(pruned)
        })
        .await
    }

    /// Removes an image, and its golden snapshots. Once that has begun, it is done and told also if
    /// the client leaves.
    ///
    /// # Errors
    ///
    /// If the name is not valid, there is no such image, or a VM needs it.
    pub async fn remove_image(self: &Arc<Self>, name: &str, registry: Option<&str>) -> Result<()> {
        let name = self.images.full_name(name, registry)?;
        self.release_image(&name).await;
        let node = Arc::clone(self);
        run_to_completion(async move {
            let removed = node.images.remove(&name, || node.check_image_unused(&name));
            removed.await?;
            node.image_changed(&name, Action::Removed);
            Ok(())
        })
        .await
    }

    /// The image of this name is another one now, or was removed.
    pub(crate) fn image_changed(&self, name: &str, action: Action) {
        self.goldens.forget_image(name);
        self.caches_changed();
        self.host.events.publish(Subject::Image, action, name);
    }

    /// Ends hidden VMs that satisfy `holds`: users' requests have priority.
    async fn end_hidden_vms(&self, holds: impl Fn(&Spec) -> bool) {
        let mut hidden = self.registry.all();
        hidden.retain(|vm| vm.spec.hidden && holds(&vm.spec));
        for vm in hidden {
            self.discard(&vm).await;
        }
    }

    /// Refuses if a VM needs the image. Hidden VMs are ended: one may have been made since
    /// [`Node::release_image`].
    pub(crate) async fn check_image_unused(&self, name: &str) -> Result<()> {
        let deadline = tokio::time::Instant::now() + NAME_TIME;
        while let Some(vm) = self.registry.any(|vm| vm.spec.image == name) {
            if vm.spec.hidden {
                self.discard(&vm).await;
                // It may have been ending already.
                let gone = vm.when(|view| view.removed);
                let gone = tokio::time::timeout_at(deadline, gone).await;
                if gone.is_ok_and(|view| view.removed) {
                    continue;
                }
            }
            return Err(Error::conflict(format!(
                "The image {name} is in use by the VM {}.",
                vm.name
            ))
            .hint(format!("Remove that VM first with `jiffy rm {}`.", vm.name)));
        }
        Ok(())
    }
}

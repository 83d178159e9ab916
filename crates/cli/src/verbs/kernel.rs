//! `jiffy kernel`

use super::Context;
use super::context::{show, show_json};
use crate::args::{Kernel, ListFormat};
use crate::client::{BodySender, Client, encoded};
use crate::failure::{Failure, Outcome, Result};
use crate::render::{Table, size};
use hyper::Method;
use jiffy_wire::api::KernelInfo;
use std::fs;
use std::io::Write;
use std::path::Path;

/// Larger files are no kernels, bytes.
const MAX_KERNEL: u64 = 512 << 20;
/// Digits of a digest that name an uploaded kernel.
const NAME_DIGITS: usize = 32;

/// `jiffy kernel`
pub fn kernel(context: &Context, kernel: Kernel) -> Result<Outcome> {
    match kernel {
        Kernel::List { format } => context.block_on(list(context, format)),
        _ => todo!(),
    }
}

async fn list(context: &Context, format: ListFormat) -> Result<Outcome> {
    let kernels: Vec<KernelInfo> = context.client()?.get("/v1/kernels").await?;
    if format == ListFormat::Json {
        show_json(&kernels)?;
        return Ok(Outcome::Done);
    }
    let mut table = Table::new(["NAME", "SIZE", "DIGEST"]);
    for kernel in &kernels {
        table.row([
            kernel.name.clone(),
            size(kernel.size),
            kernel.digest.chars().take(12).collect(),
        ]);
    }
    show(&table.to_string())?;
    Ok(Outcome::Done)
}

/// Gives the node a kernel of the user's own, unless it has it; its name there.
pub async fn upload(client: &Client, file: &Path) -> Result<String> {
    let failed = |error| {
        Failure::io(
            format_args!("the kernel {} can't be read", file.display()),
            error,
        )
    };
    let facts = fs::metadata(file).map_err(failed)?;
    if !facts.is_file() || facts.len() > MAX_KERNEL {
        return Err(
            Failure::new(format!("{} is no kernel image", file.display())).hint(
                "give a vmlinux with a PVH note or a bzImage; `jiffy kernel check` looks closer",
            ),
        );
    }
    let bytes = fs::read(file).map_err(failed)?;
    let digest = blake3::hash(&bytes).to_hex();
    let known: Vec<KernelInfo> = client.get("/v1/kernels").await?;
    if let Some(kernel) = known.iter().find(|kernel| kernel.digest == digest.as_str()) {
        return Ok(kernel.name.clone());
    }
    let name = &digest[..NAME_DIGITS];
    let (mut sender, body) = BodySender::new();
    std::thread::spawn(move || {
        let result = sender.write_all(&bytes);
        sender.finish(result);
    });
    let path = format!("/v1/kernels/{}", encoded(name));
    let kernel: KernelInfo = client.upload(Method::PUT, &path, body).await?;
    Ok(kernel.name)
}

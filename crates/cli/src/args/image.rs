//! `jiffy image`, `pull`, `push` and `commit`.

use super::{JsonFormat, ListFormat};
use clap::{Args, Subcommand, ValueEnum, ValueHint};
use std::path::PathBuf;

/// `jiffy image`
#[derive(Debug, Subcommand)]
pub enum Image {
    /// Pull an image or a snapshot from a registry, like `jiffy pull`
    Pull(Pull),
    /// Create an image from a folder, a tar, an OCI layout or the output of
    /// `docker save`
    Import(Import),
    /// Create an image of a Debian release with mmdebstrap
    Build(Build),
    /// List images
    Ls {
        /// Print only names
        #[arg(short, long, conflicts_with = "format")]
        quiet: bool,
        /// Output format
        #[arg(long, value_enum, default_value = "table")]
        format: ListFormat,
    },
    /// Show the details of images, as JSON
    Inspect {
        /// Their names
        #[arg(required = true, value_name = "IMAGE")]
        names: Vec<String>,
    },
    /// Remove images that no VM uses
    Rm {
        /// Their names
        #[arg(required = true, value_name = "IMAGE")]
        names: Vec<String>,
    },
    /// Remove images that no VM uses and that can be pulled again
    Prune {
        /// Output: their names, or json
        #[arg(long, value_enum, value_name = "FORMAT")]
        format: Option<JsonFormat>,
    },
}

/// `jiffy image import`
#[derive(Debug, Args)]
pub struct Import {
    /// Name or tag of the image, if the source has several
    #[arg(long = "ref", value_name = "NAME")]
    pub reference: Option<String>,
    /// Output: the name, or json
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<JsonFormat>,
    /// Name of the new image
    pub name: String,
    /// A folder, a file or - for stdin; files may be compressed with gzip, zstd
    /// or xz
    #[arg(value_name = "FOLDER|FILE|-", value_hint = ValueHint::AnyPath)]
    pub source: PathBuf,
}

/// `jiffy image build`
#[derive(Debug, Args)]
#[command(
    after_long_help = "mmdebstrap runs on this host, without root if the host \
permits it. Packages come from this host's apt sources, unless --mirror is given."
)]
pub struct Build {
    /// The suite: bookworm, trixie, unstable
    #[arg(long, value_name = "SUITE")]
    pub debian: String,
    /// Additional packages, separated by commas. Repeatable
    #[arg(long, value_name = "PKG", value_delimiter = ',')]
    pub include: Vec<String>,
    /// Package mirror: a URL or a line of sources.list
    #[arg(long, value_name = "MIRROR")]
    pub mirror: Option<String>,
    /// Variant of mmdebstrap: essential, apt, minbase, standard, …
    #[arg(long, value_name = "VARIANT", default_value = "minbase")]
    pub variant: String,
    /// Output: the name, or json
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<JsonFormat>,
    /// Name of the new image
    pub name: String,
}

/// When to ask the registry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum PullWhen {
    /// Each time, even if an image of that name is stored here
    Always,
    /// If no image of that name is stored here
    #[default]
    Missing,
    /// Never
    Never,
}

/// Access to a registry.
#[derive(Debug, Default, Args)]
pub struct RegistryOptions {
    /// Credentials [default: those stored by `docker login` or `podman login`]
    #[arg(long, value_name = "USER[:PASSWORD]")]
    pub creds: Option<String>,
    /// Read the password from stdin
    #[arg(long, requires = "creds")]
    pub password_stdin: bool,
    /// Use HTTP without TLS, also for registries on other hosts
    #[arg(long)]
    pub plain_http: bool,
    /// Also trust the CA certificates in this file (PEM)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub ca: Option<PathBuf>,
}

/// `jiffy image pull`
#[derive(Debug, Args)]
pub struct Pull {
    /// Platform, if the reference has several: linux/amd64, linux/arm64
    #[arg(long, value_name = "OS/ARCH")]
    pub platform: Option<String>,
    #[command(flatten)]
    pub registry: RegistryOptions,
    /// Use it only if it is signed with this public key (cosign: ECDSA P-256,
    /// PEM)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub verify_key: Option<PathBuf>,
    /// Output: the name, or json
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<JsonFormat>,
    /// HOST/REPO:TAG or HOST/REPO@DIGEST; without a host, JIFFY_REGISTRY names the
    /// registry
    #[arg(value_name = "REF")]
    pub reference: String,
}

/// `jiffy push`
#[derive(Debug, Args)]
pub struct Push {
    /// Push the snapshot NAME, even if there is an image of that name
    #[arg(long)]
    pub snapshot: bool,
    #[command(flatten)]
    pub registry: RegistryOptions,
    /// Output: the manifest's digest, or json
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<JsonFormat>,
    /// Image or snapshot to push
    #[arg(value_name = "NAME")]
    pub name: String,
    /// HOST/REPO:TAG; without a host, JIFFY_REGISTRY names the registry
    #[arg(value_name = "REF")]
    pub reference: String,
}

/// `jiffy commit`
#[derive(Debug, Args)]
pub struct Commit {
    /// Output: the image's name, or json
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<JsonFormat>,
    /// The VM: its name, its id or a unique prefix of its id
    #[arg(value_name = "VM")]
    pub vm: String,
    /// Name of the new image
    #[arg(value_name = "IMAGE")]
    pub image: String,
}

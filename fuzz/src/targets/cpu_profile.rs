//! Profiles of processors as users and snapshots give them: against one another, and
//! against every level that has a name.

use crate::Target;
use jiffy_wire::cpu::{Profile, Wanted, levels};

/// This target.
pub const TARGET: Target = Target {
    name: "cpu_profile",
    covers: &["crates/wire/src/cpu"],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    let mut texts = data.splitn(2, |byte| *byte == 0);
    let host = texts.next().and_then(profile);
    let Some(host) = host else {
        let _ = serde_json::from_slice::<Wanted>(data);
        return;
    };
    let text = serde_json::to_vec(&host).expect("a profile is written");
    assert_eq!(profile(&text).as_ref(), Some(&host));
    let _ = host.check();
    let _ = host.features();
    for level in levels::LEVELS {
        let _ = Wanted::Named(level.name.into()).of(&host);
        let _ = level.of(&host);
    }
    let Some(guest) = texts.next() else {
        return;
    };
    if let Ok(wanted) = serde_json::from_slice::<Wanted>(guest)
        && let Ok(given) = wanted.of(&host)
    {
        assert_eq!(
            given.lacking(&host),
            [""; 0],
            "the host has every feature of the guest"
        );
    }
    if let Some(guest) = profile(guest) {
        let _ = guest.lacking(&host);
        let _ = guest.common(&host).map(|common| common.features());
    }
}

fn profile(text: &[u8]) -> Option<Profile> {
    serde_json::from_slice(text).ok()
}

const INTEL: &str = r#"{"version":1,"vendor":"GenuineIntel","cpuid":{"00000000.0":"00000016 756e6547 6c65746e 49656e69","00000001.0":"000806ec 00100800 fffaf38b bfebfbff","00000007.0":"00000000 029c67af 00000000 bc000400","0000000d.0":"0000001f 00000440 00000440 00000000","80000000.0":"80000008 00000000 00000000 00000000","80000001.0":"00000000 00000000 00000121 2c100800","80000008.0":"00003027 00000000 00000000 00000000"},"msrs":{"10a":"e00000c2b"},"tsc_khz":2100000}"#;
const AMD: &str = r#"{"version":1,"vendor":"AuthenticAMD","cpuid":{"00000000.0":"0000000d 68747541 444d4163 69746e65","00000001.0":"00800f12 00080800 7ed8320b 178bfbff","00000007.0":"00000000 209c01a9 00000000 00000000","80000001.0":"00800f12 20000000 35c233ff 2fd3fbff","80000008.0":"00003028 00001007 0000300f 00000000"},"tsc_scaling":true}"#;

fn all_seeds() -> Vec<Vec<u8>> {
    let both = |host: &str, guest: &str| format!("{host}\0{guest}").into_bytes();
    let named = levels::LEVELS
        .iter()
        .map(|level| both(INTEL, &format!("\"{}\"", level.name)));
    [
        both(INTEL, INTEL),
        both(INTEL, AMD),
        both(AMD, AMD),
        AMD.into(),
    ]
    .into_iter()
    .chain(named)
    .collect()
}

//! The kernel's numbers: linux/netfilter/nf_tables.h, nfnetlink.h. The types of set keys are
//! nftables' `enum datatypes`; only userland interprets them.

/// Families (`enum nfproto`).
pub const FAMILY_INET: u8 = 1;
pub const FAMILY_IPV4: u32 = 2;
pub const FAMILY_IPV6: u32 = 10;

pub const SUBSYSTEM: u16 = 10;
pub const BATCH_BEGIN: u16 = 16;
pub const BATCH_END: u16 = 17;

/// `enum nf_tables_msg_types`.
pub const NEW_TABLE: u16 = 0;
pub const GET_TABLE: u16 = 1;
pub const DEL_TABLE: u16 = 2;
pub const NEW_CHAIN: u16 = 3;
pub const GET_CHAIN: u16 = 4;
pub const DEL_CHAIN: u16 = 5;
pub const NEW_RULE: u16 = 6;
pub const GET_RULE: u16 = 7;
#[cfg(test)]
pub const DEL_RULE: u16 = 8;
pub const NEW_SET: u16 = 9;
pub const GET_SET: u16 = 10;
pub const DEL_SET: u16 = 11;
pub const NEW_ELEMENT: u16 = 12;
pub const GET_ELEMENT: u16 = 13;
pub const DEL_ELEMENT: u16 = 14;

/// Element of any list.
pub const LIST_ELEMENT: u16 = 1;

pub mod table {
    pub const NAME: u16 = 1;
    pub const USERDATA: u16 = 6;
}

pub mod chain {
    pub const TABLE: u16 = 1;
    pub const NAME: u16 = 3;
    pub const HOOK: u16 = 4;
    pub const POLICY: u16 = 5;
    pub const TYPE: u16 = 7;
    pub const HOOK_NUMBER: u16 = 1;
    pub const HOOK_PRIORITY: u16 = 2;
}

pub mod rule {
    pub const TABLE: u16 = 1;
    pub const CHAIN: u16 = 2;
    pub const EXPRESSIONS: u16 = 4;
}

pub mod set {
    pub const TABLE: u16 = 1;
    pub const NAME: u16 = 2;
    pub const FLAGS: u16 = 3;
    pub const KEY_TYPE: u16 = 4;
    pub const KEY_LENGTH: u16 = 5;
    pub const DATA_TYPE: u16 = 6;
    pub const DATA_LENGTH: u16 = 7;
    pub const DESCRIPTION: u16 = 9;
    pub const ID: u16 = 10;
    pub const EXPRESSION: u16 = 17;
    pub const DESCRIPTION_SIZE: u16 = 1;

    pub const FLAG_INTERVAL: u32 = 0x4;
    pub const FLAG_MAP: u32 = 0x8;
    pub const FLAG_TIMEOUT: u32 = 0x10;
    /// Rules add elements.
    pub const FLAG_EVAL: u32 = 0x20;
    pub const DATA_VERDICT: u32 = 0xffff_ff00;
}

pub mod element {
    pub const TABLE: u16 = 1;
    pub const SET: u16 = 2;
    pub const ELEMENTS: u16 = 3;
    pub const KEY: u16 = 1;
    pub const DATA: u16 = 2;
    pub const FLAGS: u16 = 3;
    pub const TIMEOUT: u16 = 4;
    pub const EXPIRATION: u16 = 5;
    pub const EXPRESSION: u16 = 7;
    pub const FLAG_INTERVAL_END: u32 = 1;
}

pub mod data {
    pub const VALUE: u16 = 1;
    pub const VERDICT: u16 = 2;
    pub const VERDICT_CODE: u16 = 1;
    pub const VERDICT_CHAIN: u16 = 2;
}

pub mod expression {
    pub const NAME: u16 = 1;
    pub const DATA: u16 = 2;
}

/// `enum nft_registers`: the verdict register, and the first 4-byte register.
pub const VERDICT_REGISTER: u32 = 0;
pub const FIRST_REGISTER: u32 = 8;

/// Types of set keys and values.
pub mod kind {
    pub const IPV4: u32 = 7;
    pub const IPV6: u32 = 8;
    pub const ETHER: u32 = 9;
    pub const PROTOCOL: u32 = 12;
    pub const SERVICE: u32 = 13;
    pub const MARK: u32 = 19;
    pub const LINK: u32 = 20;
    /// The type of concatenated values.
    pub const fn concatenated(kinds: &[u32]) -> u32 {
        let mut all = 0;
        let mut at = 0;
        while at < kinds.len() {
            all = all << 6 | kinds[at];
            at += 1;
        }
        all
    }
}

//! The settable parameters of a session and its connections.

/// `enum iscsi_host_param`: text that the kernel keeps with a session's SCSI host and shows
/// in `/sys/class/iscsi_host`. The kernel does not interpret it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum HostParam {
    /// `ISCSI_HOST_PARAM_HWADDRESS`: `hwaddress`.
    #[doc(alias = "ISCSI_HOST_PARAM_HWADDRESS")]
    HardwareAddress = 0,
    /// `ISCSI_HOST_PARAM_NETDEV_NAME`: `netdev`.
    #[doc(alias = "ISCSI_HOST_PARAM_NETDEV_NAME")]
    NetworkInterface = 2,
}

/// `enum iscsi_param`. The value of each is text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Param {
    /// `ISCSI_PARAM_MAX_RECV_DLENGTH`, in bytes. Without it the kernel takes no
    /// data at all.
    #[doc(alias = "ISCSI_PARAM_MAX_RECV_DLENGTH")]
    MaxRecvDlength = 0,
    /// `ISCSI_PARAM_MAX_XMIT_DLENGTH`, in bytes. Without it writes hang.
    #[doc(alias = "ISCSI_PARAM_MAX_XMIT_DLENGTH")]
    MaxXmitDlength = 1,
    /// `ISCSI_PARAM_HDRDGST_EN`, 0 or 1.
    #[doc(alias = "ISCSI_PARAM_HDRDGST_EN")]
    HeaderDigest = 2,
    /// `ISCSI_PARAM_DATADGST_EN`, 0 or 1.
    #[doc(alias = "ISCSI_PARAM_DATADGST_EN")]
    DataDigest = 3,
    /// `ISCSI_PARAM_INITIAL_R2T_EN`, 0 or 1.
    #[doc(alias = "ISCSI_PARAM_INITIAL_R2T_EN")]
    InitialR2t = 4,
    /// `ISCSI_PARAM_MAX_R2T`: the kernel accepts only powers of 2.
    #[doc(alias = "ISCSI_PARAM_MAX_R2T")]
    MaxR2t = 5,
    /// `ISCSI_PARAM_IMM_DATA_EN`, 0 or 1.
    #[doc(alias = "ISCSI_PARAM_IMM_DATA_EN")]
    ImmediateData = 6,
    /// `ISCSI_PARAM_FIRST_BURST`, in bytes.
    #[doc(alias = "ISCSI_PARAM_FIRST_BURST")]
    FirstBurst = 7,
    /// `ISCSI_PARAM_MAX_BURST`, in bytes.
    #[doc(alias = "ISCSI_PARAM_MAX_BURST")]
    MaxBurst = 8,
    /// `ISCSI_PARAM_PDU_INORDER_EN`, 0 or 1.
    #[doc(alias = "ISCSI_PARAM_PDU_INORDER_EN")]
    PduInOrder = 9,
    /// `ISCSI_PARAM_DATASEQ_INORDER_EN`, 0 or 1.
    #[doc(alias = "ISCSI_PARAM_DATASEQ_INORDER_EN")]
    DataSequenceInOrder = 10,
    /// `ISCSI_PARAM_ERL`.
    #[doc(alias = "ISCSI_PARAM_ERL")]
    ErrorRecoveryLevel = 11,
    /// `ISCSI_PARAM_EXP_STATSN`: the number of the next status.
    #[doc(alias = "ISCSI_PARAM_EXP_STATSN")]
    ExpStatSn = 14,
    /// `ISCSI_PARAM_TARGET_NAME`.
    #[doc(alias = "ISCSI_PARAM_TARGET_NAME")]
    TargetName = 15,
    /// `ISCSI_PARAM_TPGT`: the tag of the portal group.
    #[doc(alias = "ISCSI_PARAM_TPGT")]
    PortalGroup = 16,
    /// `ISCSI_PARAM_PERSISTENT_ADDRESS`: the requested portal, not that of a redirect.
    #[doc(alias = "ISCSI_PARAM_PERSISTENT_ADDRESS")]
    PersistentAddress = 17,
    /// `ISCSI_PARAM_PERSISTENT_PORT`.
    #[doc(alias = "ISCSI_PARAM_PERSISTENT_PORT")]
    PersistentPort = 18,
    /// `ISCSI_PARAM_SESS_RECOVERY_TMO`, in seconds: how long devices stay blocked after the
    /// session is lost. With 0 they fail at once, with a negative number never.
    #[doc(alias = "ISCSI_PARAM_SESS_RECOVERY_TMO")]
    RecoveryTimeout = 19,
    /// `ISCSI_PARAM_USERNAME`: text like [`UsernameIn`](Self::UsernameIn).
    #[doc(alias = "ISCSI_PARAM_USERNAME")]
    Username = 22,
    /// `ISCSI_PARAM_USERNAME_IN`: text that the kernel keeps and shows. The kernel does not
    /// interpret it.
    #[doc(alias = "ISCSI_PARAM_USERNAME_IN")]
    UsernameIn = 23,
    /// `ISCSI_PARAM_FAST_ABORT`, 0 or 1.
    #[doc(alias = "ISCSI_PARAM_FAST_ABORT")]
    FastAbort = 26,
    /// `ISCSI_PARAM_ABORT_TMO`, in seconds.
    #[doc(alias = "ISCSI_PARAM_ABORT_TMO")]
    AbortTimeout = 27,
    /// `ISCSI_PARAM_LU_RESET_TMO`, in seconds.
    #[doc(alias = "ISCSI_PARAM_LU_RESET_TMO")]
    LuResetTimeout = 28,
    /// `ISCSI_PARAM_PING_TMO`, in seconds.
    #[doc(alias = "ISCSI_PARAM_PING_TMO")]
    PingTimeout = 30,
    /// `ISCSI_PARAM_RECV_TMO`, in seconds: how often the kernel pings an idle connection.
    #[doc(alias = "ISCSI_PARAM_RECV_TMO")]
    ReceiveTimeout = 31,
    /// `ISCSI_PARAM_IFACE_NAME`.
    #[doc(alias = "ISCSI_PARAM_IFACE_NAME")]
    InterfaceName = 32,
    /// `ISCSI_PARAM_INITIATOR_NAME`.
    #[doc(alias = "ISCSI_PARAM_INITIATOR_NAME")]
    InitiatorName = 34,
    /// `ISCSI_PARAM_TGT_RESET_TMO`, in seconds.
    #[doc(alias = "ISCSI_PARAM_TGT_RESET_TMO")]
    TargetResetTimeout = 35,
}

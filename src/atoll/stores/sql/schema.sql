CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);

CREATE TABLE templates (
    id VARCHAR(64) NOT NULL,
    version INTEGER NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    cpu DOUBLE NOT NULL,
    memory BIGINT NOT NULL,
    disk BIGINT NOT NULL,
    max_processes INTEGER NOT NULL,
    pool_size INTEGER NOT NULL,
    name TEXT NOT NULL,
    image TEXT NOT NULL,
    base_image TEXT NOT NULL,
    pre_installed_packages TEXT NOT NULL,
    requirements TEXT NOT NULL,
    python TEXT NOT NULL,
    preload TEXT NOT NULL,
    env TEXT NOT NULL,
    number INTEGER DEFAULT 1 NOT NULL,
    status VARCHAR(32) DEFAULT 'ready' NOT NULL,
    build TEXT,
    pool_max INTEGER,
    runtime VARCHAR(64),
    dockerfile TEXT,
    build_context VARCHAR(64),
    registry TEXT,
    PRIMARY KEY (id)
);

CREATE INDEX templates_created ON templates (created_at, id);
CREATE INDEX templates_status ON templates (status, id);

CREATE TABLE sessions (
    id VARCHAR(64) NOT NULL,
    template_id VARCHAR(64) NOT NULL,
    status VARCHAR(32) NOT NULL,
    wanted VARCHAR(32) NOT NULL,
    runtime_type VARCHAR(255) NOT NULL,
    runtime_node VARCHAR(255) NOT NULL,
    cpu DOUBLE NOT NULL,
    memory BIGINT NOT NULL,
    disk BIGINT NOT NULL,
    max_processes INTEGER NOT NULL,
    timeout BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    ended_at BIGINT,
    instance_id VARCHAR(64),
    cause VARCHAR(32),
    version INTEGER NOT NULL,
    workspace TEXT,
    message TEXT,
    env_vars TEXT NOT NULL,
    capacity INTEGER DEFAULT 1 NOT NULL,
    template_version INTEGER DEFAULT 1 NOT NULL,
    workspace_mode VARCHAR(32) DEFAULT 'sync' NOT NULL,
    durability VARCHAR(32) DEFAULT 'background' NOT NULL,
    started_from VARCHAR(64),
    install TEXT,
    secrets TEXT,
    volumes TEXT,
    warnings TEXT,
    labels TEXT,
    node_labels TEXT,
    auto_start INTEGER DEFAULT 1 NOT NULL,
    idle_timeout BIGINT,
    archive_after BIGINT,
    delete_after BIGINT,
    active_at BIGINT,
    rested_at BIGINT,
    failures INTEGER DEFAULT 0 NOT NULL,
    retry_at BIGINT,
    unsettled_at BIGINT,
    timer_at BIGINT,
    PRIMARY KEY (id)
);

CREATE INDEX sessions_created ON sessions (created_at, id);

CREATE INDEX sessions_status ON sessions (status, created_at, id);

CREATE INDEX sessions_template ON sessions (template_id, created_at, id);

CREATE INDEX sessions_unsettled ON sessions (runtime_node, unsettled_at);
CREATE INDEX sessions_timer ON sessions (runtime_node, timer_at);
CREATE INDEX sessions_node ON sessions (runtime_node, status, id);

CREATE TABLE executions (
    id VARCHAR(64) NOT NULL,
    session_id VARCHAR(64) NOT NULL,
    status VARCHAR(32) NOT NULL,
    created_at BIGINT NOT NULL,
    instance_id VARCHAR(64),
    started_at BIGINT,
    completed_at BIGINT,
    retry_count INTEGER NOT NULL,
    version INTEGER NOT NULL,
    request TEXT NOT NULL,
    outcome TEXT,
    return_json BLOB,
    stdout BLOB,
    stderr BLOB,
    holder VARCHAR(64),
    kept TEXT,
    invocation_id VARCHAR(64),
    attempts TEXT,
    results_json BLOB,
    ordinal BIGINT DEFAULT 1 NOT NULL,
    superseded INTEGER DEFAULT 0 NOT NULL,
    invoked_at BIGINT,
    PRIMARY KEY (id)
);

CREATE INDEX executions_created ON executions (created_at, id);

CREATE INDEX executions_status ON executions (status, created_at, id);

CREATE INDEX executions_session ON executions (session_id, created_at, id);

CREATE INDEX executions_session_status ON executions (session_id, status, created_at, id);

CREATE UNIQUE INDEX executions_invocation ON executions (invocation_id, ordinal);

CREATE TABLE instances (
    id VARCHAR(64) NOT NULL,
    node_id VARCHAR(255) NOT NULL,
    template_id VARCHAR(64) NOT NULL,
    template_version INTEGER NOT NULL,
    created_at BIGINT NOT NULL,
    session_id VARCHAR(64),
    workspace TEXT NOT NULL,
    handle TEXT NOT NULL,
    holder VARCHAR(64),
    PRIMARY KEY (id)
);

CREATE TABLE api_keys (
    id VARCHAR(64) NOT NULL,
    digest VARCHAR(128) NOT NULL,
    scope VARCHAR(32) NOT NULL,
    created_at BIGINT NOT NULL,
    name TEXT NOT NULL,
    PRIMARY KEY (id)
);

CREATE UNIQUE INDEX api_keys_digest ON api_keys (digest);

CREATE TABLE keyed_requests (
    id VARCHAR(64) NOT NULL,
    holder VARCHAR(64) NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    fingerprint VARCHAR(64),
    status INTEGER,
    kept VARCHAR(255),
    headers TEXT,
    body BLOB,
    PRIMARY KEY (id)
);

CREATE INDEX keyed_requests_expires ON keyed_requests (expires_at);

CREATE TABLE nodes (
    id VARCHAR(255) NOT NULL,
    type VARCHAR(255) NOT NULL,
    seen_at BIGINT,
    told TEXT NOT NULL,
    status VARCHAR(32) NOT NULL,
    failures INTEGER NOT NULL,
    problem TEXT,
    cordoned INTEGER NOT NULL,
    drain TEXT,
    PRIMARY KEY (id)
);

CREATE TABLE events (
    id INTEGER NOT NULL,
    number BIGINT,
    created_at BIGINT NOT NULL,
    type VARCHAR(255) NOT NULL,
    subject VARCHAR(64) NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (id)
);

CREATE UNIQUE INDEX events_number ON events (number);

CREATE TABLE webhooks (
    id VARCHAR(64) NOT NULL,
    created_at BIGINT NOT NULL,
    url TEXT NOT NULL,
    secret TEXT NOT NULL,
    types TEXT NOT NULL,
    delivered BIGINT NOT NULL,
    state TEXT,
    version INTEGER NOT NULL,
    PRIMARY KEY (id)
);

CREATE TABLE properties (
    name VARCHAR(64) NOT NULL,
    value VARCHAR(255) NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE template_versions (
    template_id VARCHAR(64) NOT NULL,
    number INTEGER NOT NULL,
    status VARCHAR(32) NOT NULL,
    template TEXT NOT NULL,
    PRIMARY KEY (template_id, number)
);

CREATE TABLE checkpoints (
    id VARCHAR(64) NOT NULL,
    number BIGINT NOT NULL,
    manifest VARCHAR(255) NOT NULL,
    created_at BIGINT NOT NULL,
    files BIGINT NOT NULL,
    size BIGINT NOT NULL,
    node_id VARCHAR(255) NOT NULL,
    kept_until BIGINT,
    version INTEGER NOT NULL,
    backups TEXT,
    PRIMARY KEY (id)
);

CREATE INDEX checkpoints_kept ON checkpoints (kept_until, id);

CREATE TABLE volumes (
    id VARCHAR(64) NOT NULL,
    created_at BIGINT NOT NULL,
    size BIGINT NOT NULL,
    kind VARCHAR(32) NOT NULL,
    node_id VARCHAR(255),
    version INTEGER NOT NULL,
    PRIMARY KEY (id)
);

CREATE INDEX volumes_created ON volumes (created_at, id);

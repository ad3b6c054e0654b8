{{- define "atoll.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "atoll.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "atoll.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "atoll.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Of replicas alone: a Job has another component. */}}
{{- define "atoll.selectorLabels" -}}
app.kubernetes.io/name: {{ include "atoll.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "atoll.labels" -}}
app.kubernetes.io/name: {{ include "atoll.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "atoll.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "atoll.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "atoll.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ required "serviceAccount.name: needed if serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "atoll.secretName" -}}
{{ .Values.existingSecret | default (include "atoll.fullname" .) }}
{{- end }}

{{- define "atoll.instancesNamespace" -}}
{{ .Values.instances.namespace | default .Release.Namespace }}
{{- end }}

{{- define "atoll.scheme" -}}
{{ ternary "https" "http" (not (empty .Values.tls.secretName)) }}
{{- end }}

{{- define "atoll.serviceHost" -}}
{{ include "atoll.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "atoll.publicUrl" -}}
{{- if .Values.publicUrl -}}
{{ .Values.publicUrl }}
{{- else if .Values.ingress.enabled -}}
{{ ternary "https" "http" (not (empty .Values.ingress.tlsSecretName)) }}://{{ .Values.ingress.host }}
{{- end }}
{{- end }}

{{/* The settings that follow from the values; `settings` takes precedence. */}}
{{- define "atoll.settings" -}}
{{- $instances := .Values.instances }}
{{- $host := include "atoll.serviceHost" . }}
{{- $settings := dict
  "ATOLL_DRIVER" "kubernetes"
  "ATOLL_HOST" "0.0.0.0"
  "ATOLL_PORT" "8000"
  "ATOLL_DATA_DIR" "/var/lib/atoll/data"
  "ATOLL_LOG_JSON" "true"
  "ATOLL_SHUTDOWN_TIMEOUT" (toString .Values.shutdownTimeout)
  "ATOLL_NODE__URL" (printf "%s://%s:%v" (include "atoll.scheme" .) $host .Values.service.port)
  "ATOLL_TRUSTED_HOSTS" (join "," (list (include "atoll.fullname" .) (trimSuffix ".svc" $host) $host (printf "%s.cluster.local" $host)))
  "ATOLL_BLOB__URL" .Values.blobs.url
  "ATOLL_BLOB__DIRECT_LINKS" (toString .Values.blobs.directLinks)
  "ATOLL_KUBERNETES__NAMESPACE" (include "atoll.instancesNamespace" .)
  "ATOLL_KUBERNETES__NODE" $instances.node
  "ATOLL_KUBERNETES__IMAGE" $instances.image
  "ATOLL_KUBERNETES__WORKSPACES" $instances.workspaces
  "ATOLL_KUBERNETES__ACCESS_MODE" $instances.accessMode
  "ATOLL_KUBERNETES__LINK" $instances.link
  "ATOLL_KUBERNETES__OPEN_NETWORK" (toString $instances.openNetwork)
  "ATOLL_KUBERNETES__CONTROL_PLANE" (include "atoll.selectorLabels" . | fromYaml | toJson)
}}
{{- $optional := dict
  "ATOLL_PUBLIC_URL" (include "atoll.publicUrl" .)
  "ATOLL_BLOB__ENDPOINT" .Values.blobs.endpoint
  "ATOLL_BLOB__REGION" .Values.blobs.region
  "ATOLL_KUBERNETES__IMAGE_PULL_SECRETS" (join ":" $instances.imagePullSecrets)
  "ATOLL_KUBERNETES__RUNTIME_CLASS" $instances.runtimeClass
  "ATOLL_KUBERNETES__RUNTIME_CLASSES" (join ":" $instances.runtimeClasses)
  "ATOLL_KUBERNETES__STORAGE_CLASS" $instances.storageClass
  "ATOLL_KUBERNETES__BUCKET_CLAIM" $instances.bucketClaim
  "ATOLL_KUBERNETES__PRIORITY_CLASS" $instances.priorityClassName
}}
{{- range $name, $value := $optional }}
{{- if $value }}
{{- $_ := set $settings $name $value }}
{{- end }}
{{- end }}
{{- if $instances.lendInterpreter }}
{{- $_ := set $settings "ATOLL_KUBERNETES__INTERPRETER_IMAGE" (include "atoll.image" .) }}
{{- end }}
{{- if $instances.nodeSelector }}
{{- $_ := set $settings "ATOLL_KUBERNETES__NODE_SELECTOR" (toJson $instances.nodeSelector) }}
{{- end }}
{{- if $instances.tolerations }}
{{- $_ := set $settings "ATOLL_KUBERNETES__TOLERATIONS" (toJson $instances.tolerations) }}
{{- end }}
{{- if .Values.tls.secretName }}
{{- $_ := set $settings "ATOLL_TLS_CERT" "/etc/atoll/tls/tls.crt" }}
{{- $_ := set $settings "ATOLL_TLS_KEY" "/etc/atoll/tls/tls.key" }}
{{- else }}
{{- $_ := set $settings "ATOLL_INSECURE" (toString .Values.tls.insecure) }}
{{- end }}
{{- range $name, $value := .Values.settings }}
{{- /* Helm reads large integers as 1.073741824e+10. */}}
{{- $whole := and (kindIs "float64" $value) (eq (floor $value) (float64 $value)) }}
{{- $_ := set $settings $name ($whole | ternary (printf "%.0f" (float64 $value)) (toString $value)) }}
{{- end }}
{{- toYaml $settings }}
{{- end }}

{{- define "atoll.secretData" -}}
{{- $names := dict
  "databaseUrl" "ATOLL_DATABASE_URL"
  "redisUrl" "ATOLL_REDIS_URL"
  "apiKey" "ATOLL_API_KEY"
  "secretsKey" "ATOLL_SECRETS__KEY"
  "blobAccessKeyId" "ATOLL_BLOB__ACCESS_KEY_ID"
  "blobSecretAccessKey" "ATOLL_BLOB__SECRET_ACCESS_KEY"
}}
{{- $data := dict }}
{{- range $value, $name := $names }}
{{- with get $.Values.secrets $value }}
{{- $_ := set $data $name (b64enc .) }}
{{- end }}
{{- end }}
{{- toYaml $data }}
{{- end }}

{{- define "atoll.podSecurityContext" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- with .Values.podSecurityContext }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "atoll.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
